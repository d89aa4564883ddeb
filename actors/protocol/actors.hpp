#pragma once

// Every typed interface of smp, one comment line per handler. The SCHEDULE
// ACTOR, which users write, has a header of its own that includes none of
// this: actors/protocol/schedule_interface.hpp.

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

/// WORKER CONTEXT: keeps one running or suspended execution, which starts,
/// parks and ends by a `context_link` to its MODULE SERVER.
using worker_context_actor = caf::typed_actor<
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

/// A stage of communication, each with this interface (`comm_stage` names
/// them): takes the messages that it has something to copy for. All else goes
/// on where it is and is only counted.
using comm_stage_actor = caf::typed_actor<
  // INTERNAL: it has something to copy for this message.
  caf::result<void>(comm_message_ptr),
  // Replies with what it did and holds.
  caf::result<comm_stage_status>(status_atom)>;

// -- interfaces: users --------------------------------------------------------

// SCHEDULE ACTOR: `schedule_actor` in actors/protocol/schedule_interface.hpp
// decides in place of the PIPELINE SCHEDULER's own schedules; one handler for
// each kind of event of a step, all of which reply with the next task.

// -- interfaces: between processes --------------------------------------------

/// MEMBER: listens to the SUPERVISOR on behalf of one rank.
using member_actor = caf::typed_actor<
  // A rank is lost.
  caf::result<void>(down_atom, failure),
  // INTERNAL: from now on the end of the SUPERVISOR is no loss.
  caf::result<void>(goodbye_atom),
  // Replies with what it heard.
  caf::result<member_status>(status_atom)>;

/// RANK WATCH: tells what its rank does, on a thread of its own, even while the
/// other actors of the rank are stuck.
using rank_watch_actor = caf::typed_actor<
  // Replies with a number that differs from the last one if anything happened.
  caf::result<uint64_t>(look_atom),
  // The run is stalled, in words, and goes on.
  caf::result<void>(stall_atom, std::string),
  // The run is stalled: ends the rank.
  caf::result<void>(stall_atom, failure),
  // That step fails, unless it is over.
  caf::result<void>(stall_atom, step_failed),
  // Replies with what the rank executes and waits for.
  caf::result<rank_view>(status_atom),
  // Replies with all that its actors tell, for who looks from outside.
  caf::result<rank_status>(inspect_atom)>;

/// STALL MONITOR: asks all ranks from time to time whether anything happens.
using stall_monitor_actor = caf::typed_actor<
  // INTERNAL: it is time to look.
  caf::result<void>(look_atom),
  // Replies with what it found.
  caf::result<stall_status>(status_atom)>;

/// INSPECTOR: tells who looks at the run from outside what all ranks do, on a
/// thread of its own, also while others do not answer.
using inspector_actor = caf::typed_actor<
  // From the SUPERVISOR: a rank joined and can be asked.
  caf::result<void>(rank_id, rank_watch_actor),
  // From the SUPERVISOR: who looks for stalls.
  caf::result<void>(stall_monitor_actor),
  // Replies with what ranks and actors answer within a deadline.
  caf::result<run_status>(inspect_atom)>;

/// SUPERVISOR: gathers the ranks of a run and tells all when one is lost.
using supervisor_actor = caf::typed_actor<
  // A rank introduces itself; replies when all are there, or why they are not.
  caf::result<welcome>(member, member_actor),
  // A rank that joined can be watched for stalls.
  caf::result<void>(rank_id, rank_watch_actor),
  // From this process: an INSPECTOR wants to hear of such ranks.
  caf::result<void>(inspector_actor),
  // A rank leaves: its end is no loss from now on.
  caf::result<void>(goodbye_atom, rank_id),
  // The launcher saw the process of a rank end.
  caf::result<void>(down_atom, failure),
  // The launcher, or a neighbour that waits to join, saw a signal stop the
  // process of a rank, or let it go on.
  caf::result<void>(stall_atom, rank_id, bool),
  // INTERNAL: a rank was stopped for as long as is worth a report.
  caf::result<void>(stall_atom, rank_id),
  // INTERNAL: the time for joining is over.
  caf::result<void>(deadline_atom),
  // INTERNAL: nobody knew a better cause for the loss of this rank.
  caf::result<void>(deadline_atom, rank_id),
  // Replies with who is there, who left and who is lost.
  caf::result<supervisor_status>(status_atom)>;

} // namespace smp

// -- type ids of handles: append only, too ------------------------------------

CAF_BEGIN_TYPE_ID_BLOCK(smp_actors, caf::id_block::smp::end)
  CAF_ADD_TYPE_ID(smp_actors, (smp::member_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::rank_watch_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::stall_monitor_actor))
  CAF_ADD_TYPE_ID(smp_actors, (smp::inspector_actor))
CAF_END_TYPE_ID_BLOCK(smp_actors)

static_assert(caf::id_block::smp_actors::end
              <= caf::id_block::smp_inspection::begin);

// From there on actors/protocol/comm_types.hpp counts.
static_assert(caf::id_block::smp_inspection::end <= smp::first_comm_type_id);
