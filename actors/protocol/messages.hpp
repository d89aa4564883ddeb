#pragma once

// What the actors of one rank tell each other. Free of CAF; what crosses ranks
// is encoded in actors/protocol/wire.hpp.

#include "actors/protocol/request.hpp"
#include "partition/schedule.hpp"

#include <string>
#include <vector>

namespace smp {

/// A context parked: it needs `what` and gives the token back.
struct suspended {
  context_id context;
  call what;
};

/// A context sent a request and goes on.
struct asked {
  context_id context;
  call what;
};

/// A context is idle again and gives the token back.
struct finished {
  context_id context;
  outcome result;
};

/// What a call of kind `wait` waited for is done, or a request could not be
/// sent.
struct completed {
  request_id id;
  failure error;
};

/// A response could not be sent; its requester needs to hear at least that.
struct undelivered {
  request_id id;
  failure error;
};

/// A microbatch stands at the end of its forward phase.
struct forward_done {
  request_id id;
  microbatch_id microbatch;
};

/// A microbatch ended: nobody will ask for what was kept for it (R3).
struct microbatch_done {
  step_id step;
  microbatch_id microbatch;
};

/// A rank began to work, or has nothing left to do. Sent to pp_rank 0, and only
/// if the schedule wants to know.
struct rank_report {
  step_id step;
  rank_level level;
};

/// A microbatch will call no module any more in its forward phase: it stands at
/// its end, or is over. Sent once for each (R19).
struct forward_over {
  step_id step;
  uint64_t turn = 0; // see `request::turn`
};

/// What pp_rank 0 decided about recording a step (R33); comes before anything
/// of the step is served.
struct step_plan {
  enum class mode : uint8_t { record, replay };

  step_id step;
  mode what = mode::record;
  /// Names the kind of step: only steps of one key replay each other.
  uint64_t key = 0;
  /// Which recorded step is replayed.
  step_id source;
  /// All pipelines that share modules follow the same computed order.
  bool same_order = false;
};

constexpr step_plan::mode last_of(step_plan::mode) noexcept {
  return step_plan::mode::replay;
}

/// Stands for a request that looks as it did in the replayed step.
struct recorded_request {
  request_id id;
  std::vector<tensor_ref> tensors;
  /// See `request::released`.
  std::vector<object_id> released = {};
};

/// Stands for an answer that looks as it did in the replayed step.
struct recorded_response {
  request_id id;
  std::vector<tensor_ref> tensors;
};

/// The flow of a step diverges from its record: from now on it is served as if
/// there were none. Goes to pp_rank 0, and from there to all.
struct step_diverged {
  step_id step;
  std::string text;
};

/// Orders the PIPELINE SCHEDULER to run the microbatches of a step.
struct scheduled_step {
  run_step what;
  /// What starts one after the other; empty: the schedule decides.
  std::vector<task> recorded = {};
  /// Instead: a microbatch starts when the one before it ended.
  bool serial = false;
};

/// A step has its first failure: nothing new starts, it only unwinds.
struct step_failed {
  step_id step;
  failure error;
};

} // namespace smp
