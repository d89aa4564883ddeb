#pragma once

#include "transport/flight/flight_event.hpp"

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// The events of a rank, for readers.
struct flight_log {
  rank_id rank;
  uint64_t pid = 0;
  std::string host;
  /// Equal for processes whose clocks are one.
  std::string clock;
  /// Nanoseconds from the epoch to the zero of that clock.
  int64_t epoch = 0;
  /// Paths of modules, and texts.
  std::map<uint32_t, std::string> names;
  /// In the order of their times.
  std::vector<flight_event> events;
  /// Earlier events, or those beyond the limit of a trace.
  uint64_t lost = 0;

  /// @returns "" for a name that is not known
  const std::string& name(uint32_t x) const;

  /// @returns the number of a name; `unknown_name` if no event has it
  uint32_t number_of(std::string_view name) const;
};

/// Reads what `flight_record` keeps, even if its process was killed in the
/// middle of an event.
/// @throws error (protocol) if it is no image, or damaged
flight_log read_flight_image(std::span<const std::byte> image);

} // namespace smp
