#pragma once

// Messages between the actors of one rank. Free of CAF;
// actors/protocol/wire.hpp encodes those that cross ranks.

#include "actors/protocol/request.hpp"
#include "partition/schedule/schedule.hpp"

#include <string>
#include <vector>

namespace smp {

/// A context parked: it needs `what` and returns the token.
struct suspended {
  context_id context;
  call what;
};

/// A context sent a request and continues.
struct asked {
  context_id context;
  call what;
};

/// A context is idle again and returns the token.
struct finished {
  context_id context;
  outcome result;
};

/// The wait of a call of kind `wait` is over, the objects that a request needs
/// have arrived, or a request could not be sent.
struct completed {
  request_id id;
  failure error;
};

/// A response could not be sent; the requester must at least learn that.
struct undelivered {
  request_id id;
  failure error;
};

/// A microbatch reached the end of its forward phase.
struct forward_done {
  request_id id;
  microbatch_id microbatch;
};

/// A microbatch ended: no request needs its saved data any more (R3).
struct microbatch_done {
  step_id step;
  microbatch_id microbatch;
};

/// A rank became busy or ran out of work. Sent to pp_rank 0, and only if the
/// schedule needs it.
struct rank_report {
  step_id step;
  rank_level level;
};

/// A microbatch makes no more module calls in its forward phase: it reached the
/// end of the phase, or is over. Sent once per microbatch (R19).
struct forward_over {
  step_id step;
  uint64_t start_number = 0; // see `request::start_number`
};

/// Decision of pp_rank 0 whether to record or replay a step (R33); arrives
/// before any request of the step is served.
struct step_plan {
  enum class mode : uint8_t { record, replay };

  step_id step;
  mode what = mode::record;
  /// Identifies the kind of step: steps replay only steps with the same key.
  uint64_t key = 0;
  /// The recorded step to replay.
  step_id source;
  /// All pipelines that share modules follow the same computed order.
  bool same_order = false;
};

constexpr step_plan::mode last_of(step_plan::mode) noexcept {
  return step_plan::mode::replay;
}

/// The step diverges from its record: all ranks continue it without the record.
/// Sent to pp_rank 0, which forwards it to all ranks.
struct step_diverged {
  step_id step;
  std::string text;
};

/// Orders the PIPELINE SCHEDULER to run the microbatches of a step.
struct scheduled_step {
  run_step what;
  /// Tasks to start, in this order; empty: the schedule decides.
  std::vector<task> recorded = {};
  /// Alternative: start each microbatch when the one before it has ended.
  bool serial = false;
};

/// A step has its first failure: nothing more starts, and it unwinds.
struct step_failed {
  step_id step;
  failure error;
};

} // namespace smp
