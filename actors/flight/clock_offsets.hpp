#pragma once

#include "actors/flight/timeline.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace smp {

/// How a rank's clock differs from that of the first log, in ns.
struct clock_offset {
  /// To be added to the times of the rank.
  int64_t offset = 0;
  /// The true offset differs by at most so much; 0: it is the same clock.
  int64_t uncertainty = 0;
  /// No messages went both ways: the machines' own dates were compared, whose
  /// error nobody knows.
  bool by_date = false;
};

/// Machines start their clocks when they boot. Each message says that it was
/// taken after it was sent, so the fastest ones in both directions bound the
/// difference from both sides (Cristian's algorithm, with the messages of the
/// run itself). Machines that send each other nothing are compared through
/// others.
/// @param timelines by log
/// @returns by log
std::vector<clock_offset>
clock_offsets(std::span<const flight_log> logs,
              std::span<const flight_timeline> timelines);

} // namespace smp
