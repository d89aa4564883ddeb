#pragma once

// SCHEDULE ACTOR: the interface of schedules that users write, and its
// messages.

#include "actors/protocol/schedule_events.hpp"
#include "transport/inspect.hpp"

#include <caf/type_id.hpp>
#include <caf/typed_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

namespace smp {

// -- messages -----------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, step_begins& x) {
  return f.object(x).fields(
    f.field("step", x.step), f.field("microbatches", x.microbatches),
    f.field("partitions", x.partitions), f.field("active", x.active));
}

template <class Inspector>
bool inspect(Inspector& f, task_started& x) {
  return f.object(x).fields(f.field("what", x.what));
}

template <class Inspector>
bool inspect(Inspector& f, forward_ended& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, backward_ready& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, backward_ended& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, memory_level& x) {
  return f.object(x).fields(f.field("pp_rank", x.pp_rank),
                            f.field("bytes", x.bytes));
}

template <class Inspector>
bool inspect(Inspector& f, rank_activity& x) {
  return f.object(x).fields(f.field("pp_rank", x.pp_rank),
                            f.field("busy", x.busy));
}

template <class Inspector>
bool inspect(Inspector& f, schedule_answer& x) {
  return f.object(x).fields(f.field("next", x.next));
}

/// Type ids of smp are below this one; those of users start here.
inline constexpr caf::type_id_t first_user_type_id = caf::first_custom_type_id
                                                     + 200;

} // namespace smp

CAF_BEGIN_TYPE_ID_BLOCK(smp_schedule, caf::first_custom_type_id + 100)
  CAF_ADD_TYPE_ID(smp_schedule, (smp::task))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::step_begins))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::task_started))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::forward_ended))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::backward_ready))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::backward_ended))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::memory_level))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::rank_activity))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::schedule_answer))
CAF_END_TYPE_ID_BLOCK(smp_schedule)

namespace smp {

// -- the interface ------------------------------------------------------------

/// SCHEDULE ACTOR: decides which microbatch starts or turns around next, in
/// place of `smp.pipeline`'s built-in schedules. It lives on pp_rank 0, one
/// instance for all steps, on its own thread. It receives one message at a time
/// and answers each with the next task or with "wait"; it gets the next message
/// only after its answer.
///
/// Every answer is checked. A step ends with an error that names the actor and
/// the event if the actor throws, does not answer within 60 seconds, names a
/// task twice, too early or for a microbatch that the step does not have,
/// exceeds `smp.active_microbatches`, or waits while nothing is in flight. The
/// next step then gets a new instance.
using schedule_actor = caf::typed_actor<
  // First in each step; from pp_rank 0.
  caf::result<schedule_answer>(step_begins),
  // After each task that it named; from pp_rank 0.
  caf::result<schedule_answer>(task_started),
  // Once per microbatch; from pp_rank 0.
  caf::result<schedule_answer>(forward_ended),
  // Once per microbatch that has a backward phase; from pp_rank 0.
  caf::result<schedule_answer>(backward_ready),
  // Once per microbatch; from pp_rank 0.
  caf::result<schedule_answer>(backward_ended),
  // When a rank becomes busy or idle, if its level has changed; from each rank.
  // While an answer is due, only the latest one of each rank is kept.
  caf::result<schedule_answer>(memory_level),
  // When a rank becomes busy or idle; from each rank, as above.
  caf::result<schedule_answer>(rank_activity)>;

} // namespace smp
