#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/train/trainer.hpp"

#include <fstream>
#include <mutex>
#include <string>
#include <string_view>

namespace smp::app {

/// What one rank did, as lines with timestamps, for log-RANK.txt. Thread-safe.
class rank_log final : public train_listener {
public:
  /// Writes to stderr, which the launcher keeps as the rank's log.
  explicit rank_log(log_level level);

  /// Writes to `path`, for a rank that smp's launcher did not start.
  /// @throws error (config) naming `path`
  rank_log(log_level level, const std::string& path);

  void info(std::string_view text);

  void on_start(const train_start& x) override;

  void on_step(const step_metrics& x) override;

  void on_evaluation(uint64_t step, double loss) override;

  void on_checkpoint(uint64_t step, const saved_checkpoint& x) override;

private:
  void write(log_level level, std::string_view text);

  std::mutex mutex_;
  log_level level_;
  std::ofstream file_;
};

} // namespace smp::app
