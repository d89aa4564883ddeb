#pragma once

// Every typed interface of smp, one comment line per handler.
//
// Requests, responses, calls and outcomes carry tensors by reference: they may
// be sent inside a process only. Between ranks they go through the fabric
// (actors/protocol/wire.hpp), and CAF refuses to write them to a socket.

#include "actors/cluster/membership.hpp"
#include "actors/protocol/messages.hpp"
#include "actors/board/rank_view.hpp"
#include "transport/inspect.hpp"

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/fwd.hpp>
#include <caf/type_id.hpp>
#include <caf/typed_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include <string>
#include <vector>

namespace smp {

// -- membership ---------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, member& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("pid", x.pid), f.field("host", x.host),
    f.field("run_id", x.run_id), f.field("build", x.build),
    f.field("config_hash", x.config_hash),
    f.field("fabric_address", x.fabric_address));
}

/// Answers a rank that wants to take part: all members, or why not.
struct welcome {
  std::vector<member> members; // by rank
  failure error;
};

template <class Inspector>
bool inspect(Inspector& f, welcome& x) {
  return f.object(x).fields(f.field("members", x.members),
                            f.field("error", x.error));
}

// -- status -------------------------------------------------------------------

struct context_status {
  context_id context;
  context_state state = context_state::idle;
  request_id current;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  /// What it waits for while PENDING.
  std::string waits_for;
  /// In this state for so long.
  double seconds = 0;
  uint64_t served = 0;
};

template <class Inspector>
bool inspect(Inspector& f, context_status& x) {
  return f.object(x).fields(
    f.field("context", x.context), f.field("state", x.state),
    f.field("current", x.current), f.field("microbatch", x.microbatch),
    f.field("module", x.module), f.field("what", x.what),
    f.field("waits_for", x.waits_for), f.field("seconds", x.seconds),
    f.field("served", x.served));
}

struct scheduler_status {
  step_id step;
  uint64_t running = 0; // microbatches that were started and did not end
  uint64_t left = 0;    // microbatches that did not end
  /// What the schedule actor of the user owes an answer to, and since when in
  /// seconds; empty if nothing.
  std::string asks;
  double seconds = 0;
};

template <class Inspector>
bool inspect(Inspector& f, scheduler_status& x) {
  return f.object(x).fields(f.field("step", x.step),
                            f.field("running", x.running),
                            f.field("left", x.left), f.field("asks", x.asks),
                            f.field("seconds", x.seconds));
}

struct member_status {
  rank_id rank;
  std::vector<failure> losses; // heard of, first one first
};

template <class Inspector>
bool inspect(Inspector& f, member_status& x) {
  return f.object(x).fields(f.field("rank", x.rank),
                            f.field("losses", x.losses));
}

struct supervisor_status {
  uint64_t world_size = 0;
  std::vector<rank_id> present;
  std::vector<rank_id> gone;   // said goodbye
  std::vector<failure> losses; // first one first
};

template <class Inspector>
bool inspect(Inspector& f, supervisor_status& x) {
  return f.object(x).fields(f.field("world_size", x.world_size),
                            f.field("present", x.present),
                            f.field("gone", x.gone),
                            f.field("losses", x.losses));
}

struct server_status;

// -- stalls -------------------------------------------------------------------

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

struct stall_status {
  uint64_t reports = 0;
  /// The last report.
  std::string text;
};

template <class Inspector>
bool inspect(Inspector& f, stall_status& x) {
  return f.object(x).fields(f.field("reports", x.reports),
                            f.field("text", x.text));
}

} // namespace smp

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::request)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::response)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::call)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::outcome)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::suspended)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::asked)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::finished)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::completed)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::undelivered)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::forward_done)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::forward_over)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::microbatch_done)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_failed)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_report)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::run_step)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::rank_report)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_plan)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_diverged)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::scheduled_step)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::recorded_request)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::recorded_response)

// -- type ids: append only, all ranks run the same build ----------------------

// The types of the first handshake come first: two builds that number the
// others differently still understand each other so far as to say so.

CAF_BEGIN_TYPE_ID_BLOCK(smp, first_custom_type_id)
  CAF_ADD_TYPE_ID(smp, (smp::member))
  CAF_ADD_TYPE_ID(smp, (smp::welcome))
  CAF_ADD_TYPE_ID(smp, (smp::rank_id))
  CAF_ADD_TYPE_ID(smp, (smp::failure))
  CAF_ADD_TYPE_ID(smp, (smp::request))
  CAF_ADD_TYPE_ID(smp, (smp::response))
  CAF_ADD_TYPE_ID(smp, (smp::call))
  CAF_ADD_TYPE_ID(smp, (smp::outcome))
  CAF_ADD_TYPE_ID(smp, (smp::suspended))
  CAF_ADD_TYPE_ID(smp, (smp::finished))
  CAF_ADD_TYPE_ID(smp, (smp::completed))
  CAF_ADD_TYPE_ID(smp, (smp::undelivered))
  CAF_ADD_TYPE_ID(smp, (smp::forward_done))
  CAF_ADD_TYPE_ID(smp, (smp::microbatch_done))
  CAF_ADD_TYPE_ID(smp, (smp::step_failed))
  CAF_ADD_TYPE_ID(smp, (smp::step_report))
  CAF_ADD_TYPE_ID(smp, (smp::run_step))
  CAF_ADD_TYPE_ID(smp, (smp::context_status))
  CAF_ADD_TYPE_ID(smp, (smp::server_status))
  CAF_ADD_TYPE_ID(smp, (smp::scheduler_status))
  CAF_ADD_TYPE_ID(smp, (smp::member_status))
  CAF_ADD_TYPE_ID(smp, (smp::supervisor_status))
  CAF_ADD_ATOM(smp, smp, status_atom)
  CAF_ADD_ATOM(smp, smp, token_atom)
  CAF_ADD_ATOM(smp, smp, down_atom)
  CAF_ADD_ATOM(smp, smp, malformed_atom)
  CAF_ADD_ATOM(smp, smp, goodbye_atom)
  CAF_ADD_ATOM(smp, smp, deadline_atom)
  CAF_ADD_TYPE_ID(smp, (smp::rank_report))
  CAF_ADD_TYPE_ID(smp, (smp::forward_over))
  CAF_ADD_ATOM(smp, smp, moved_atom)
  CAF_ADD_TYPE_ID(smp, (smp::step_plan))
  CAF_ADD_TYPE_ID(smp, (smp::step_diverged))
  CAF_ADD_TYPE_ID(smp, (smp::scheduled_step))
  CAF_ADD_TYPE_ID(smp, (smp::recorded_request))
  CAF_ADD_TYPE_ID(smp, (smp::recorded_response))
  CAF_ADD_TYPE_ID(smp, (smp::asked))
  CAF_ADD_TYPE_ID(smp, (smp::rank_view))
  CAF_ADD_TYPE_ID(smp, (smp::stall_status))
  CAF_ADD_ATOM(smp, smp, look_atom)
  CAF_ADD_ATOM(smp, smp, stall_atom)
CAF_END_TYPE_ID_BLOCK(smp)

namespace smp {

// -- interfaces: one rank -----------------------------------------------------

/// MODULE SERVER: owns the ready queue and the WORKER CONTEXTS of one rank,
/// and on pp_rank 0 the PIPELINE SCHEDULER.
using module_server_actor = caf::typed_actor<
  // Opens the gate for a step; its end comes as a callback.
  caf::result<void>(run_step),
  // From pp_rank 0: whether a step is recorded or replayed (R33).
  caf::result<void>(step_plan),
  // A step diverges from its record; on pp_rank 0: tells all ranks.
  caf::result<void>(step_diverged),
  // Queues a request of another rank or of the SCHEDULER; no reply, the answer
  // is a response of its own.
  caf::result<void>(request),
  // The same, from the record.
  caf::result<void>(recorded_request),
  // Wakes the context that waits for this answer; counts it if nobody does.
  caf::result<void>(response),
  // The same, from the record.
  caf::result<void>(recorded_response),
  // INTERNAL: what a context waited for is done, or its request was not sent,
  // or the objects that a request needs are here.
  caf::result<void>(completed),
  // INTERNAL: a response was not sent; tells its requester.
  caf::result<void>(undelivered),
  // A forward phase is over; from the SCHEDULER: tells all ranks (R19).
  caf::result<void>(forward_over),
  // INTERNAL: a held request may have its turn now.
  caf::result<void>(moved_atom),
  // A microbatch ended; from the SCHEDULER: tells all ranks (R3).
  caf::result<void>(microbatch_done),
  // The step fails; from the SCHEDULER: tells all ranks.
  caf::result<void>(step_failed),
  // The step ended; from the SCHEDULER: tells all ranks (R5, R6).
  caf::result<void>(step_report),
  // On pp_rank 0, from all ranks: for the SCHEDULER.
  caf::result<void>(rank_report),
  // A rank is dead: fails what waits for it.
  caf::result<void>(down_atom, failure),
  // A rank sent what makes no sense: from now on it counts as dead.
  caf::result<void>(malformed_atom, failure),
  // INTERNAL: the execution token came to this rank (R26).
  caf::result<void>(token_atom),
  // INTERNAL: a WORKER CONTEXT sends a request and goes on.
  caf::result<void>(asked),
  // INTERNAL: a WORKER CONTEXT parked and gives the token back.
  caf::result<void>(suspended),
  // INTERNAL: a WORKER CONTEXT is idle and gives the token back.
  caf::result<void>(finished),
  // Replies with what the rank holds and waits for.
  caf::result<server_status>(status_atom)>;

/// WORKER CONTEXT: the state machine of one running or suspended execution.
using worker_context_actor = caf::typed_actor<
  // Starts a request (IDLE -> EXECUTING).
  caf::result<void>(request),
  // Continues after a call (PENDING -> EXECUTING).
  caf::result<void>(response),
  // INTERNAL: its executor parked at a call (EXECUTING -> PENDING), or sent a
  // promise and goes on (EXECUTING).
  caf::result<void>(call),
  // INTERNAL: its executor ended the request (EXECUTING -> IDLE).
  caf::result<void>(outcome),
  // Replies at any time, also while the executor runs.
  caf::result<context_status>(status_atom)>;

/// PIPELINE SCHEDULER: decides which microbatch starts or turns around next.
using pipeline_scheduler_actor = caf::typed_actor<
  // Runs the microbatches of a step; ends with a report to its SERVER.
  caf::result<void>(scheduled_step),
  // The step does not go on as recorded: from here on the SCHEDULER decides.
  caf::result<void>(step_diverged),
  // A microbatch waits for its backward phase; the grant is a response with
  // the same id.
  caf::result<void>(forward_done),
  // A microbatch ended.
  caf::result<void>(response),
  // The step fails: nothing new starts.
  caf::result<void>(step_failed),
  // A rank began or ended to work; for a schedule of the user's.
  caf::result<void>(rank_report),
  // Replies with the progress of the current step.
  caf::result<scheduler_status>(status_atom)>;

// -- interfaces: between processes --------------------------------------------

/// MEMBER: one rank's ear for the SUPERVISOR.
using member_actor = caf::typed_actor<
  // A rank is lost.
  caf::result<void>(down_atom, failure),
  // INTERNAL: from now on the loss of the SUPERVISOR is none.
  caf::result<void>(goodbye_atom),
  // Replies with what it heard.
  caf::result<member_status>(status_atom)>;

/// RANK WATCH: tells what its rank does, on a thread of its own, whatever the
/// other actors of the rank are stuck in.
using rank_watch_actor = caf::typed_actor<
  // Replies with a number that differs from the last one if anything happened.
  caf::result<uint64_t>(look_atom),
  // The run is stalled, in words, and goes on.
  caf::result<void>(stall_atom, std::string),
  // The run is stalled: ends the rank.
  caf::result<void>(stall_atom, failure),
  // Replies with what the rank executes and waits for.
  caf::result<rank_view>(status_atom)>;

/// STALL MONITOR: asks all ranks from time to time whether anything happens.
using stall_monitor_actor = caf::typed_actor<
  // INTERNAL: it is time to look.
  caf::result<void>(look_atom),
  // Replies with what it found.
  caf::result<stall_status>(status_atom)>;

/// SUPERVISOR: gathers the ranks of a run and tells all when one is lost.
using supervisor_actor = caf::typed_actor<
  // A rank introduces itself; replies when all are there, or why they are not.
  caf::result<welcome>(member, member_actor),
  // A rank that joined can be watched for stalls.
  caf::result<void>(rank_id, rank_watch_actor),
  // A rank leaves: its end is no loss from now on.
  caf::result<void>(goodbye_atom, rank_id),
  // The launcher saw the process of a rank end.
  caf::result<void>(down_atom, failure),
  // INTERNAL: the time for joining is over.
  caf::result<void>(deadline_atom),
  // INTERNAL: nobody knew a better cause for the loss of this rank.
  caf::result<void>(deadline_atom, rank_id),
  // Replies with who is there, who left and who is lost.
  caf::result<supervisor_status>(status_atom)>;

// -- status of a whole rank ---------------------------------------------------

/// A request that no context has yet, and why.
struct queued_request {
  request_id id;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  std::string why;
};

struct server_status {
  rank_id rank;
  step_id step;
  bool in_step = false;
  uint64_t ready = 0;   // work that waits for the token
  bool in_line = false; // for the token, which another one has
  uint64_t later = 0;   // requests of a later step
  uint64_t held = 0;    // requests whose turn it is not (R19)
  uint64_t blocked = 0; // requests that wait for objects or for another one
  uint64_t dropped = 0; // requests of an older step
  uint64_t unknown = 0; // responses that nobody waits for
  uint64_t pending = 0; // calls without an answer
  std::vector<queued_request> queue;
  std::vector<worker_context_actor> contexts;
  /// Set on pp_rank 0 only.
  pipeline_scheduler_actor scheduler;
};

} // namespace smp

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::server_status)

CAF_BEGIN_TYPE_ID_BLOCK(smp_actors, caf::id_block::smp::end)
  CAF_ADD_TYPE_ID(smp_actors, (smp::member_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::rank_watch_actor))
CAF_END_TYPE_ID_BLOCK(smp_actors)

// From there on actors/schedule/schedule_actor.hpp counts.
static_assert(caf::id_block::smp_actors::end
              <= caf::first_custom_type_id + 100);
