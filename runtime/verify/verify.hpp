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
  /// How close a gradient or update came to its bound until now; 1: at it.
  double share = 0;
  uint64_t differences = 0; // in this step
};

/// Enough steps show all that a job does.
inline constexpr uint64_t enough_steps = 3;

/// @returns how many steps at most show enough of those that are replayed
/// (docs/static_mode.md), or of all where none are
uint64_t steps_to_verify(const train_config& config);

struct verify_options {
  uint64_t steps = enough_steps;
  /// Ends earlier once so many steps began to replay a record.
  std::optional<uint64_t> replays = {};
  /// Instead of the job's own partition, modules go to the ranks in turn: all
  /// that can cross ranks does.
  bool split = false;
  /// Called on rank 0 after each step.
  std::function<void(const verify_step&)> on_step;
};

/// Runs `train` for some steps and compares every step of it with the same
/// step of one process, which rank 0 runs in between, on the same data and
/// seeds. At each step that one starts from the pipeline's parameters and
/// buffers. Every rank of the session calls this.
/// @param config the number of train.steps, which the learning rate depends
///        on, is kept unless it is smaller than `options.steps`
/// @param listener hears of the pipeline's run as in `train`
/// @param stop as in `train`
/// @returns what was found; only the numbers of steps and of differences on
///          ranks other than 0
/// @throws error as `train`; (numbers) only if both runs end so
verify_summary verify(session& s, const train_config& config,
                      const std::string& run_dir, train_listener& listener,
                      const std::atomic<bool>& stop,
                      const verify_options& options, const train_job& job = {});

} // namespace smp
