#pragma once

// The last seconds of a rank in a row of cells.

#include "actors/flight/timeline.hpp"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace smp::app {

/// What took most of a cell's time. What a rank waits for counts only where it
/// does nothing else.
enum class strip_cell : uint8_t {
  idle,
  wait,
  communication, // collectives, and transfers while nothing executes
  optimizer,
  backward,
  forward,
};

inline constexpr size_t strip_cells = 6; // kinds of them

/// @returns "F", "B", "o", "c", "." or a blank
char letter_of(strip_cell x) noexcept;

/// @returns "forward" ...
std::string_view name_of(strip_cell x) noexcept;

/// @param optimizer the name of that activity in the record
/// @param begin, end by the clock of `x`, in ns
/// @returns `cells` parts of the time between the two
std::vector<strip_cell> strip_of(const flight_timeline& x, uint32_t optimizer,
                                 int64_t begin, int64_t end, size_t cells);

} // namespace smp::app
