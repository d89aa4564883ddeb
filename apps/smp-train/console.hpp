#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/train/trainer.hpp"

#include <cstdint>
#include <string>

namespace smp::app {

/// Shows a run to the user, on stderr of rank 0. On a terminal the line of the
/// running step is overwritten; elsewhere a line comes every log interval.
class console final : public train_listener {
public:
  struct options {
    /// stderr is, or is connected to, a terminal.
    bool terminal = false;
    log_level level = log_level::info;
    /// The console has the first lines of an earlier start of this run, which
    /// say the same.
    bool again = false;
    /// The command that goes on after an interrupt; empty: the same again.
    std::string resumes = {};
  };

  console(const train_config& config, options x);

  /// First lines: what runs where.
  void begin(const std::string& config_path, uint64_t ranks,
             const std::string& run_dir);

  void on_decision(const partition_decision& x, session& s, model_state& state,
                   trainable& whole) override;

  void on_start(const train_start& x) override;

  void on_step(const step_metrics& x) override;

  void on_evaluation(uint64_t step, double loss) override;

  void on_checkpoint(uint64_t step, const saved_checkpoint& x) override;

  /// Last lines: what came out.
  void end(const train_summary& x, const std::string& run_dir);

private:
  bool quiet() const {
    return options_.level < log_level::info;
  }

  std::string bold(const std::string& x) const;
  void clear_line();
  std::string row(const step_metrics& x) const;
  void end_with_files(const train_summary& x, const std::string& run_dir) const;

  const train_config& config_;
  options options_;
  activation_need activations_;
  uint64_t tokens_per_sample_ = 0;
  uint64_t steps_ = 0;      // that this run made
  double mean_seconds_ = 0; // of recent ones
  bool line_open_ = false;
};

} // namespace smp::app
