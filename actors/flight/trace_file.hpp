#pragma once

#include "actors/flight/clock_offsets.hpp"
#include "actors/flight/timeline.hpp"

#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// A period that a rank was expected to execute, in ns since its step began.
struct planned_slice {
  rank_id rank;
  uint32_t step = 0;
  int64_t begin = 0;
  int64_t end = 0;
  microbatch_id microbatch;
  phase in = phase::forward;
};

/// @returns the first and the last step that all of `logs` have from beginning
/// to end; {0, 0} if there is none
std::pair<uint32_t, uint32_t> complete_steps(std::span<const flight_log> logs);

/// Removes what is not of the steps from `first` to `last`, or of the time
/// between one of them and the next step.
void keep_steps(flight_log& x, uint32_t first, uint32_t last);

/// Writes what ranks did in the Trace Event Format, which Perfetto and Chrome
/// show: a process for each rank, with a track for its user's thread, one for
/// what it executes, and one for each of its contexts; transfers and
/// collectives; arrows from requests to their executions and from answers back;
/// memory; what was planned. Times are of the clock of `logs[0]`.
/// @param logs at least one
void write_trace(std::ostream& out, std::span<const flight_log> logs,
                 std::span<const planned_slice> plan = {});

} // namespace smp
