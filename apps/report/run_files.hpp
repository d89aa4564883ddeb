#pragma once

// What the files of a run directory say, also after the end of the run.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

/// The last step that counts in metrics.jsonl.
struct last_step {
  uint64_t step = 0;
  std::optional<double> loss; // none: not finite
  double step_seconds = 0;    // mean over the last steps
  double samples_per_second = 0;
  std::optional<double> grad_norm = {};
  std::optional<double> bubble = {};
  /// Of the last steps, the last one last.
  std::vector<double> losses = {};
};

struct run_files {
  /// The directory has files of a run.
  bool found = false;
  std::optional<last_step> last;
  /// From config.toml; 0: not known.
  uint64_t steps = 0;
  uint64_t tokens_per_sample = 0; // also 0 if samples are not sequences
  /// The newest checkpoint's step, and when it was written.
  std::optional<uint64_t> checkpoint;
  std::chrono::system_clock::time_point checkpoint_time;
  /// How the run ended, if smp's launcher saw it: the exit code and the first
  /// cause, empty if there is none.
  std::optional<int> exit_code;
  std::string cause;
  /// How often it had been started again by then.
  uint64_t restarts = 0;
  /// The last stall that was reported, over or not; empty: none.
  std::string stall;

  bool finished() const noexcept {
    return last && steps > 0 && last->step >= steps;
  }
};

/// Never throws: what cannot be read is left out.
run_files read_run_files(const std::string& run_dir);

/// A key of the run's configuration.
struct config_setting {
  std::string name;
  std::string value;
  /// "quickstart.toml:12"; empty: a default.
  std::string origin;
};

/// @returns what RUN_DIR/config.toml has; nothing if there is none
std::vector<config_setting> read_settings(const std::string& run_dir);

/// @returns "step 40/100, loss 2.5111"; empty before the first step
std::string progress_text(const run_files& x);

} // namespace smp::app
