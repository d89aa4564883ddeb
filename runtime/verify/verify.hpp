#pragma once

// smp-train verify: the configured job over its ranks and the same job in one
// process, side by side, compared after each step (R35, R36).

#include "runtime/train/trainer.hpp"
#include "runtime/verify/findings.hpp"

#include <atomic>
#include <functional>
#include <optional>
#include <string>

namespace smp {

/// One step of both runs.
struct verify_step {
  uint64_t step = 0; // from 1
  double loss = 0;
  double reference_loss = 0;
  /// How close gradients and updates came to their bound so far; 1: at it.
  double share = 0;
  uint64_t differences = 0; // in this step
};

/// This many steps show all that a job does.
inline constexpr uint64_t enough_steps = 3;

/// @returns how many steps it takes at most until enough of them were replayed
/// (docs/modes.md), or until there are enough if none are replayed
uint64_t steps_to_verify(const train_config& config);

struct verify_options {
  uint64_t steps = enough_steps;
  /// Ends early once this many steps began to replay a record.
  std::optional<uint64_t> replays = {};
  /// Assigns modules to the ranks in turn, instead of the job's own partition:
  /// everything that can cross ranks does.
  bool split = false;
  /// Called on rank 0 after each step.
  std::function<void(const verify_step&)> on_step;
};

/// Runs `train` for some steps and compares each step with the same step of one
/// process, which rank 0 runs in between, on the same data and seeds. The
/// single process starts each step from the pipeline's parameters and buffers.
/// Every rank of the session calls this.
/// @param config train.steps, on which the learning rate depends, is kept
///        unless it is smaller than `options.steps`
/// @param listener receives the events of the pipeline's run as in `train`
/// @param stop as in `train`
/// @returns the findings; on ranks other than 0 only the numbers of steps and
///          of differences
/// @throws error as `train` does; (numbers) only if both runs end with it
verify_summary verify(session& s, const train_config& config,
                      const std::string& run_dir, train_listener& listener,
                      const std::atomic<bool>& stop,
                      const verify_options& options, const train_job& job = {});

} // namespace smp
