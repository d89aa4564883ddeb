#pragma once

// CAF inspectors of all messages that cross processes. All other messages
// between actors hold tensors and stay inside a process.

#include "actors/protocol/comm_status.hpp"
#include "actors/protocol/introduction.hpp"
#include "actors/protocol/messages.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/run_status.hpp"
#include "actors/protocol/status.hpp"
#include "transport/inspect.hpp"

namespace smp {

template <class Inspector>
bool inspect(Inspector& f, stall_options& x) {
  return f.object(x).fields(f.field("timeout", x.timeout),
                            f.field("end", x.end));
}

template <class Inspector>
bool inspect(Inspector& f, member& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("pid", x.pid), f.field("host", x.host),
    f.field("machine", x.machine), f.field("cores", x.cores),
    f.field("run_id", x.run_id), f.field("build", x.build),
    f.field("settings", x.settings),
    f.field("fabric_address", x.fabric_address), f.field("stalls", x.stalls));
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
    f.field("gone", x.gone), f.field("losses", x.losses),
    f.field("stopped", x.stopped));
}

template <class Inspector>
bool inspect(Inspector& f, activity& x) {
  return f.object(x).fields(
    f.field("who", x.who), f.field("executes", x.executes),
    f.field("ends_step", x.ends_step),
    f.field("of_later_step", x.of_later_step), f.field("what", x.what),
    f.field("serves", x.serves), f.field("waits_for", x.waits_for),
    f.field("subject", x.subject), f.field("from", x.from),
    f.field("asks", x.asks), f.field("seconds", x.seconds),
    f.field("brief", x.brief), f.field("awaits", x.awaits));
}

template <class Inspector>
bool inspect(Inspector& f, traffic& x) {
  return f.object(x).fields(f.field("peer", x.peer), f.field("sent", x.sent),
                            f.field("taken", x.taken),
                            f.field("queued", x.queued));
}

template <class Inspector>
bool inspect(Inspector& f, shared_calls& x) {
  return f.object(x).fields(
    f.field("module", x.module), f.field("microbatch", x.microbatch),
    f.field("phase", x.what), f.field("calls", x.calls),
    f.field("waits", x.waits), f.field("running", x.running));
}

template <class Inspector>
bool inspect(Inspector& f, step_failed& x) {
  return f.object(x).fields(f.field("step", x.step), f.field("error", x.error));
}

template <class Inspector>
bool inspect(Inspector& f, rank_view& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("progress", x.progress),
    f.field("left", x.left), f.field("complete", x.complete),
    f.field("settled", x.settled), f.field("refused", x.refused),
    f.field("activities", x.activities), f.field("peers", x.peers),
    f.field("step", x.step), f.field("sharers", x.sharers),
    f.field("shared", x.shared));
}

template <class Inspector>
bool inspect(Inspector& f, comm_stage_status& x) {
  return f.object(x).fields(
    f.field("stage", x.stage), f.field("handled", x.handled),
    f.field("bytes", x.bytes), f.field("passed_by", x.passed_by),
    f.field("held", x.held));
}

template <class Inspector>
bool inspect(Inspector& f, stall_status& x) {
  return f.object(x).fields(
    f.field("reports", x.reports), f.field("text", x.text),
    f.field("standing", x.standing), f.field("quiet_seconds", x.quiet_seconds));
}

template <class Inspector>
bool inspect(Inspector& f, status_item& x) {
  return f.object(x).fields(f.field("name", x.name), f.field("value", x.value));
}

template <class Inspector>
bool inspect(Inspector& f, actor_status& x) {
  return f.object(x).fields(
    f.field("id", x.id), f.field("name", x.name), f.field("parent", x.parent),
    f.field("answers", x.answers), f.field("state", x.state),
    f.field("waits_for", x.waits_for), f.field("seconds", x.seconds),
    f.field("items", x.items));
}

template <class Inspector>
bool inspect(Inspector& f, arena_status& x) {
  return f.object(x).fields(
    f.field("capacity", x.capacity), f.field("used", x.used),
    f.field("wanted", x.wanted), f.field("high_water", x.high_water),
    f.field("largest_free", x.largest_free), f.field("blocks", x.blocks),
    f.field("refused", x.refused));
}

template <class Inspector>
bool inspect(Inspector& f, comm_peer_status& x) {
  return f.object(x).fields(f.field("peer", x.peer), f.field("open", x.open),
                            f.field("open_bytes", x.open_bytes),
                            f.field("queued", x.queued),
                            f.field("queued_bytes", x.queued_bytes));
}

template <class Inspector>
bool inspect(Inspector& f, comm_message_status& x) {
  return f.object(x).fields(
    f.field("number", x.number), f.field("peer", x.peer),
    f.field("bytes", x.bytes), f.field("at", x.at),
    f.field("waits_for", x.waits_for), f.field("seconds", x.seconds));
}

template <class Inspector>
bool inspect(Inspector& f, comm_report& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("device_path", x.device_path),
    f.field("stages", x.stages), f.field("sent", x.sent),
    f.field("received", x.received), f.field("send_arena", x.send_arena),
    f.field("receive_arena", x.receive_arena), f.field("peers", x.peers),
    f.field("oldest", x.oldest));
}

template <class Inspector>
bool inspect(Inspector& f, comm_status& x) {
  return f.object(x).fields(f.field("messages_sent", x.messages_sent),
                            f.field("bytes_sent", x.bytes_sent),
                            f.field("messages_received", x.messages_received),
                            f.field("bytes_received", x.bytes_received),
                            f.field("messages_refused", x.messages_refused),
                            f.field("stages", x.stages));
}

template <class Inspector>
bool inspect(Inspector& f, offload_status& x) {
  return f.object(x).fields(
    f.field("bytes", x.bytes), f.field("peak_bytes", x.peak_bytes),
    f.field("file_bytes", x.file_bytes), f.field("written", x.written),
    f.field("read", x.read), f.field("stayed", x.stayed),
    f.field("wait_seconds", x.wait_seconds));
}

template <class Inspector>
bool inspect(Inspector& f, device_status& x) {
  return f.object(x).fields(f.field("name", x.name),
                            f.field("memory", x.memory),
                            f.field("peak_memory", x.peak_memory),
                            f.field("total_memory", x.total_memory));
}

template <class Inspector>
bool inspect(Inspector& f, rank_status& x) {
  return f.object(x).fields(
    f.field("pid", x.pid), f.field("host", x.host),
    f.field("pp_rank", x.pp_rank), f.field("tp_rank", x.tp_rank),
    f.field("rdp_rank", x.rdp_rank), f.field("view", x.view),
    f.field("step", x.step), f.field("in_step", x.in_step),
    f.field("queue", x.queue), f.field("up_seconds", x.up_seconds),
    f.field("busy_seconds", x.busy_seconds), f.field("bubble", x.bubble),
    f.field("memory", x.memory), f.field("peak_memory", x.peak_memory),
    f.field("device", x.device), f.field("offload", x.offload),
    f.field("comm", x.comm), f.field("actors", x.actors));
}

template <class Inspector>
bool inspect(Inspector& f, rank_entry& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("health", x.health), f.field("why", x.why),
    f.field("seconds", x.seconds), f.field("known", x.known),
    f.field("status", x.status));
}

template <class Inspector>
bool inspect(Inspector& f, run_status& x) {
  return f.object(x).fields(
    f.field("pid", x.pid), f.field("host", x.host), f.field("ranks", x.ranks),
    f.field("stalls", x.stalls), f.field("actors", x.actors));
}

} // namespace smp
