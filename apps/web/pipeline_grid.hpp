#pragma once

// What ranks did in the last steps, for the page: ranks from top to bottom,
// time from left to right.

#include "actors/flight/timeline.hpp"
#include "apps/report/run_json.hpp"

#include <cstdint>
#include <span>

namespace smp::app {

struct grid_limits {
  /// Shown time, in seconds: some steps, as long as it is between these.
  double least = 0.02;
  double most = 20;
  uint64_t steps = 6;
  /// Slices of all ranks together.
  size_t slices = 20000;
};

/// @param quiet_seconds how long nothing had happened when the events were
///        asked for: what goes on since then lasts until now
/// @returns "seconds" (how much is shown), "kinds" and "names", and for each
/// rank "slices" of [begin, end, kind, name], with times in microseconds from
/// the left; "steps" of [begin, number]. Slices of a kind that leave no gap
/// that one could see are one slice.
json grid_json(std::span<const flight_log> logs, double quiet_seconds,
               const grid_limits& limits = {});

} // namespace smp::app
