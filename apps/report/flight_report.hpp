#pragma once

// What ranks did last, as text and JSON.

#include "actors/flight/timeline.hpp"
#include "apps/report/run_json.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace smp::app {

struct flight_selection {
  /// Events of all ranks together, the last ones.
  uint64_t last = 50;
  /// Of this rank only.
  std::optional<uint64_t> rank;
};

/// @returns for each rank what it was in the middle of when its record ends,
/// then the last events of all ranks in the order of their times
std::string flight_text(std::span<const flight_log> logs,
                        const flight_selection& x);

/// The same: "ranks" with what each was in the middle of, and "events".
json flight_json(std::span<const flight_log> logs, const flight_selection& x);

} // namespace smp::app
