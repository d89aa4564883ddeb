#pragma once

// A run as metrics for Prometheus, in its text format 0.0.4.

#include "apps/report/run_source.hpp"
#include "apps/web/metrics_history.hpp"

#include <chrono>
#include <optional>
#include <span>
#include <string>

namespace smp::app {

struct metric_family {
  const char* name;
  const char* type; // "gauge" or "counter"
  const char* help;
};

/// All that there can be; a run tells a part of them.
std::span<const metric_family> metric_families();

struct metrics_input {
  std::string run; // its name, a label of each metric
  const run_look& look;
  step_totals totals = {};
  std::optional<step_point> last = {};
  std::chrono::system_clock::time_point now = {};
};

std::string prometheus_text(const metrics_input& x);

} // namespace smp::app
