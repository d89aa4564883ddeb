#pragma once

// How CAF reads and writes what crosses processes. All else that actors tell
// each other holds tensors and stays inside a process.

#include "actors/protocol/introduction.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/status.hpp"
#include "transport/inspect.hpp"

namespace smp {

template <class Inspector>
bool inspect(Inspector& f, member& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("pid", x.pid), f.field("host", x.host),
    f.field("run_id", x.run_id), f.field("build", x.build),
    f.field("settings", x.settings),
    f.field("fabric_address", x.fabric_address));
}

template <class Inspector>
bool inspect(Inspector& f, welcome& x) {
  return f.object(x).fields(f.field("members", x.members),
                            f.field("error", x.error));
}

template <class Inspector>
bool inspect(Inspector& f, context_status& x) {
  return f.object(x).fields(
    f.field("context", x.context), f.field("state", x.state),
    f.field("current", x.current), f.field("microbatch", x.microbatch),
    f.field("module", x.module), f.field("what", x.what),
    f.field("waits_for", x.waits_for), f.field("seconds", x.seconds),
    f.field("served", x.served));
}

template <class Inspector>
bool inspect(Inspector& f, scheduler_status& x) {
  return f.object(x).fields(f.field("step", x.step),
                            f.field("running", x.running),
                            f.field("left", x.left), f.field("asks", x.asks),
                            f.field("seconds", x.seconds));
}

template <class Inspector>
bool inspect(Inspector& f, member_status& x) {
  return f.object(x).fields(f.field("rank", x.rank),
                            f.field("losses", x.losses));
}

template <class Inspector>
bool inspect(Inspector& f, supervisor_status& x) {
  return f.object(x).fields(
    f.field("world_size", x.world_size), f.field("present", x.present),
    f.field("gone", x.gone), f.field("losses", x.losses));
}

template <class Inspector>
bool inspect(Inspector& f, activity& x) {
  return f.object(x).fields(
    f.field("who", x.who), f.field("executes", x.executes),
    f.field("what", x.what), f.field("serves", x.serves),
    f.field("waits_for", x.waits_for), f.field("from", x.from),
    f.field("asks", x.asks), f.field("seconds", x.seconds));
}

template <class Inspector>
bool inspect(Inspector& f, traffic& x) {
  return f.object(x).fields(f.field("peer", x.peer), f.field("sent", x.sent),
                            f.field("taken", x.taken),
                            f.field("queued", x.queued));
}

template <class Inspector>
bool inspect(Inspector& f, rank_view& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("progress", x.progress),
    f.field("left", x.left), f.field("complete", x.complete),
    f.field("settled", x.settled), f.field("refused", x.refused),
    f.field("activities", x.activities), f.field("peers", x.peers));
}

template <class Inspector>
bool inspect(Inspector& f, stall_status& x) {
  return f.object(x).fields(f.field("reports", x.reports),
                            f.field("text", x.text));
}

} // namespace smp
