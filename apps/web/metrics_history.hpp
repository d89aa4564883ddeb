#pragma once

// The steps of a run, from metrics.jsonl while it grows.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::app {

/// One training step; what is not known or not finite is NaN.
struct step_point {
  static constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

  uint64_t step = 0;
  double loss = unknown;
  double grad_norm = unknown;
  double lr = unknown;
  double step_seconds = unknown;
  double samples_per_second = unknown;
  double bubble_ratio = unknown;
  double device_memory = unknown; // the most of a rank, in bytes
  double held_out_loss = unknown;
};

/// Something that happened, as the files of a run tell it.
struct run_event {
  std::string when; // "step 12", or the time of the day
  std::string text;
  bool bad = false;
};

/// Sums over all steps.
struct step_totals {
  uint64_t steps = 0;
  uint64_t requests = 0;
  uint64_t bytes_sent = 0;
  /// Steps whose loss or gradient was not finite.
  uint64_t nonfinite = 0;
  /// Steps that updated nothing.
  uint64_t skipped = 0;
};

/// Keeps a bounded number of points, however long the run: every second one
/// goes when there is no more room.
class metrics_history {
public:
  static constexpr size_t most_points = 1024;
  static constexpr size_t most_events = 200;

  explicit metrics_history(std::string path) : path_(std::move(path)) {
    // nop
  }

  /// Reads what was added, some megabytes at a time. Never throws: what cannot
  /// be read is left out.
  /// @returns whether there is more to read
  bool update();

  /// Oldest first; the last one is that of the last step.
  std::vector<step_point> points() const;

  step_totals totals() const;

  /// Nothing before the end of the first step.
  const std::optional<step_point>& last() const noexcept {
    return last_;
  }

  std::vector<run_event> events() const;

private:
  struct parsed_line {
    std::optional<step_point> point;
    step_totals totals;
    std::vector<run_event> events;
  };

  static parsed_line parse(const std::string& line);
  void commit(const parsed_line& x);

  std::string path_;
  /// Where the last complete line begins: it may still change.
  uint64_t offset_ = 0;
  std::optional<parsed_line> open_;
  uint64_t stride_ = 1;
  uint64_t count_ = 0;
  std::vector<step_point> points_;
  std::vector<run_event> events_;
  step_totals totals_;
  std::optional<step_point> last_;
};

} // namespace smp::app
