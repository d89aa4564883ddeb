#pragma once

// Events that a user's schedule receives, and its answers. Free of CAF.

#include "partition/schedule/schedule.hpp"
#include "transport/ids.hpp"

#include <optional>
#include <string>
#include <variant>

namespace smp {

/// A step begins. Discard all state of the previous step, which may have failed
/// half-way.
struct step_begins {
  step_id step;
  uint64_t microbatches = 1;
  uint64_t partitions = 1;
  /// `smp.active_microbatches`: upper bound on the microbatches between the
  /// start of their forward phase and their end.
  uint64_t active = 1;
};

/// The task that the actor just named has started. The actor may name another.
struct task_started {
  task what;
};

/// The forward phase of a microbatch is over; its activations are kept.
struct forward_ended {
  microbatch_id microbatch;
};

/// The backward phase of a microbatch may start. Follows `forward_ended`,
/// except for a step body without backward (evaluation).
struct backward_ready {
  microbatch_id microbatch;
};

/// A microbatch is over and its activations are free: after its backward
/// phase, or right after `forward_ended` if it has none.
struct backward_ended {
  microbatch_id microbatch;
};

/// A rank keeps more or less memory than before: the bytes that its process
/// allocated since the step began.
struct memory_level {
  uint64_t pp_rank = 0;
  uint64_t bytes = 0;
};

/// A rank becomes busy, or has nothing to do until a message arrives.
struct rank_activity {
  uint64_t pp_rank = 0;
  bool busy = false;
};

using schedule_event = std::variant<step_begins, task_started, forward_ended,
                                    backward_ready, backward_ended,
                                    memory_level, rank_activity>;

/// @returns "forward ended, microbatch 3".
std::string to_string(const schedule_event& x);

/// The task to start now; without a task the schedule waits for the next event.
struct schedule_answer {
  std::optional<task> next;
};

/// Starts the forward phase of `x`.
inline schedule_answer start_forward(microbatch_id x) {
  return {task{x, phase::forward}};
}

/// Starts the backward phase of `x`.
inline schedule_answer start_backward(microbatch_id x) {
  return {task{x, phase::backward}};
}

/// Starts nothing until the next event. An error while nothing is in flight, as
/// no event would follow.
inline schedule_answer wait_for_event() {
  return {};
}

} // namespace smp
