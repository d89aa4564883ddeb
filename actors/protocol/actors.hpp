#pragma once

// All typed actor interfaces of smp, one comment line per handler. The SCHEDULE
// ACTOR, which users write, has its own header, which includes none of this:
// actors/protocol/schedule_interface.hpp.

#include "actors/protocol/comm_types.hpp"
#include "actors/protocol/schedule_interface.hpp"
#include "actors/protocol/type_ids.hpp"

#include <caf/typed_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include <string>

namespace smp {

// -- interfaces: one rank -----------------------------------------------------

/// MODULE SERVER: owns the ready queue and the WORKER CONTEXTS of one rank,
/// and on pp_rank 0 the PIPELINE SCHEDULER.
using module_server_actor = caf::typed_actor<
  // From the fabric: what another rank sent, with the sender. If it is
  // malformed, treats that rank as dead from now on.
  caf::result<void>(rank_id, message),
  // Opens the gate for a step; a callback reports its end.
  caf::result<void>(run_step),
  // From pp_rank 0: whether to record or replay a step (R33).
  caf::result<void>(step_plan),
  // A step diverges from its record; pp_rank 0 tells all ranks.
  caf::result<void>(step_diverged),
  // Queues a request from another rank or the SCHEDULER. No reply: a separate
  // response message carries the answer.
  caf::result<void>(request),
  // Wakes the context that waits for this response; counts it if none does.
  caf::result<void>(response),
  // INTERNAL: what a context waited for is done, or its request could not be
  // sent, or the objects that a request needs have arrived.
  caf::result<void>(completed),
  // INTERNAL: a response could not be sent; tells the requester.
  caf::result<void>(undelivered),
  // A forward phase ended; if from the SCHEDULER, tells all ranks (R19).
  caf::result<void>(forward_over),
  // INTERNAL: held requests may have their turn now.
  caf::result<void>(moved_atom),
  // A microbatch ended; if from the SCHEDULER, tells all ranks (R3).
  caf::result<void>(microbatch_done),
  // The step failed; if from the SCHEDULER, tells all ranks.
  caf::result<void>(step_failed),
  // The step ended; if from the SCHEDULER, tells all ranks (R5, R6).
  caf::result<void>(step_report),
  // On pp_rank 0, from any rank: forwards it to the SCHEDULER.
  caf::result<void>(rank_report),
  // A rank is dead: fails everything that waits for it.
  caf::result<void>(down_atom, failure),
  // INTERNAL: this rank now holds the execution token (R26).
  caf::result<void>(token_atom),
  // INTERNAL: a WORKER CONTEXT sends a request and continues.
  caf::result<void>(asked),
  // INTERNAL: a WORKER CONTEXT parked and returns the token.
  caf::result<void>(suspended),
  // INTERNAL: a WORKER CONTEXT is idle and returns the token.
  caf::result<void>(finished),
  // INTERNAL: the device did what an execution launched until it parked or
  // ended.
  caf::result<void>(reached_atom),
  // Replies with what the rank holds and waits for.
  caf::result<server_status>(status_atom)>;

/// WORKER CONTEXT: holds one running or suspended execution, which starts,
/// parks and ends through its `executor`.
using worker_context_actor = caf::typed_actor<
  // Replies at any time, even while the executor runs.
  caf::result<context_status>(status_atom)>;

/// PIPELINE SCHEDULER: decides which microbatch starts or turns around next.
using pipeline_scheduler_actor = caf::typed_actor<
  // Runs the microbatches of a step, then reports to its MODULE SERVER.
  caf::result<void>(scheduled_step),
  // The step diverges from its record: the SCHEDULER decides from here on.
  caf::result<void>(step_diverged),
  // A microbatch waits for its backward phase; a response with the same id
  // grants it.
  caf::result<void>(forward_done),
  // A microbatch ended.
  caf::result<void>(response),
  // The step failed: starts nothing more.
  caf::result<void>(step_failed),
  // A rank became busy or idle; for schedules that users write.
  caf::result<void>(rank_report),
  // Replies with the progress of the current step.
  caf::result<scheduler_status>(status_atom)>;

/// One stage of communication; all stages have this interface (`comm_stage`
/// names them). A stage receives only messages for which it has something to
/// copy. All others continue on the thread they are on and are merely counted.
using comm_stage_actor = caf::typed_actor<
  // INTERNAL: copies tensors of this message.
  caf::result<void>(comm_message_ptr),
  // Replies with what the stage did and holds.
  caf::result<comm_stage_status>(status_atom)>;

// -- interfaces: users --------------------------------------------------------

// SCHEDULE ACTOR: `schedule_actor` in actors/protocol/schedule_interface.hpp
// replaces the built-in schedules of the PIPELINE SCHEDULER. It has one handler
// per kind of event of a step, each of which replies with the next task.

// -- interfaces: between processes --------------------------------------------

/// MEMBER: listens to the SUPERVISOR on behalf of one rank.
using member_actor = caf::typed_actor<
  // A rank is lost.
  caf::result<void>(down_atom, failure),
  // INTERNAL: from now on, the end of the SUPERVISOR is not a loss.
  caf::result<void>(goodbye_atom),
  // Replies with the losses that it has heard of.
  caf::result<member_status>(status_atom)>;

/// LAUNCHER LINK: listens to the SUPERVISOR on behalf of the launcher of
/// another machine.
using launcher_link_actor = caf::typed_actor<
  // The run ends by this stall.
  caf::result<void>(stall_atom, failure),
  // The run is over, or begins again.
  caf::result<void>(again_atom, bool)>;

/// RANK WATCH: reports what its rank does. Runs on a thread of its own, so it
/// answers even while the other actors of the rank are stuck.
using rank_watch_actor = caf::typed_actor<
  // Replies with a number that differs from the last one if anything happened.
  caf::result<uint64_t>(look_atom),
  // The run is stalled, as the text says, but continues.
  caf::result<void>(stall_atom, std::string),
  // The run is stalled: ends this rank.
  caf::result<void>(stall_atom, failure),
  // Fails this step unless it is already over.
  caf::result<void>(stall_atom, step_failed),
  // Replies with what the rank executes and waits for.
  caf::result<rank_view>(status_atom),
  // Replies with all its actors report, for clients outside the run.
  caf::result<rank_status>(inspect_atom),
  // Replies with an image of its events (transport/flight/), or with where its
  // threads are (transport/stacks/), for the same.
  caf::result<std::string>(flight_query)>;

/// STALL MONITOR: polls all ranks for progress.
using stall_monitor_actor = caf::typed_actor<
  // INTERNAL: time to poll.
  caf::result<void>(look_atom),
  // Replies with its findings.
  caf::result<stall_status>(status_atom)>;

/// INSPECTOR: reports to clients outside the run what all ranks do. Runs on a
/// thread of its own, and answers even if some ranks do not.
using inspector_actor = caf::typed_actor<
  // From the SUPERVISOR: a rank joined and can be queried.
  caf::result<void>(rank_id, rank_watch_actor),
  // From the SUPERVISOR: the actor that searches for stalls.
  caf::result<void>(stall_monitor_actor),
  // Replies with what ranks and actors answer within a deadline.
  caf::result<run_status>(inspect_atom),
  // Replies with the answers of those ranks that answer within a deadline.
  caf::result<std::vector<std::string>>(flight_query)>;

/// SUPERVISOR: gathers the ranks of a run and tells all when one is lost.
using supervisor_actor = caf::typed_actor<
  // A rank introduces itself; replies when all have joined, or why not.
  caf::result<welcome>(member, member_actor),
  // The RANK WATCH of a rank that joined.
  caf::result<void>(rank_id, rank_watch_actor),
  // From this process: an INSPECTOR that wants to know these RANK WATCHes.
  caf::result<void>(inspector_actor),
  // A rank leaves: its end is not a loss from now on.
  caf::result<void>(goodbye_atom, rank_id),
  // The launcher saw the process of a rank end.
  caf::result<void>(down_atom, failure),
  // The same, with a result: it is lost by this if it has not left before.
  caf::result<void>(goodbye_atom, failure),
  // The launcher, or a neighbour that waits to join, saw a signal stop or
  // continue the process of a rank.
  caf::result<void>(stall_atom, rank_id, bool),
  // The launcher of another machine, by its index, which wants to hear how the
  // run ends.
  caf::result<void>(uint64_t, launcher_link_actor),
  // From this process: the run ends by this, which those launchers hear.
  caf::result<void>(stall_atom, failure),
  // From this process: whether the run begins again. Replies with the machines
  // whose launchers have heard it, when the others cannot any more.
  caf::result<std::vector<uint64_t>>(again_atom, bool),
  // INTERNAL: a rank has been stopped for long enough to report it.
  caf::result<void>(stall_atom, rank_id),
  // INTERNAL: the join deadline has passed.
  caf::result<void>(deadline_atom),
  // INTERNAL: no better cause for the loss of this rank arrived in time.
  caf::result<void>(deadline_atom, rank_id),
  // Replies with which ranks are present, left or lost.
  caf::result<supervisor_status>(status_atom)>;

} // namespace smp

// -- type ids of handles: append only, too ------------------------------------

CAF_BEGIN_TYPE_ID_BLOCK(smp_actors, caf::first_custom_type_id + 41)
  CAF_ADD_TYPE_ID(smp_actors, (smp::member_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::rank_watch_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::stall_monitor_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::inspector_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::launcher_link_actor))
CAF_END_TYPE_ID_BLOCK(smp_actors)

static_assert(caf::id_block::smp::end <= caf::id_block::smp_actors::begin);
static_assert(caf::id_block::smp_actors::end
              <= caf::id_block::smp_inspection::begin);

// The ids from there on belong to actors/protocol/comm_types.hpp.
static_assert(caf::id_block::smp_inspection::end <= smp::first_comm_type_id);
