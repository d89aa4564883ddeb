#pragma once

// The flight records of the ranks of a launcher, which outlive the ranks.

#include "transport/files/file_descriptor.hpp"
#include "transport/flight/flight_record.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace smp {

/// Variable of a rank: the number of the descriptor of `flight_descriptor`.
inline constexpr const char* flight_descriptor_variable = "SMP_FLIGHT_FD";

/// @returns memory for the records of all ranks of this machine, which they
/// inherit. Pages cost nothing until a rank writes to them. None if the system
/// has none, as with a low `ulimit -f`: ranks then have memory of their own.
file_descriptor flight_descriptor(uint64_t ranks);

/// @returns the record of this rank, in memory that its launcher reads when the
/// rank is gone; in memory of its own if there is no such launcher
std::shared_ptr<flight_record> make_flight_record(rank_id self);

/// @returns RUN_DIR/flight-RANK
std::string flight_path(const std::string& run_dir, rank_id x);

/// Writes RUN_DIR/flight-RANK; one that is there is replaced as a whole.
/// @returns an empty string, or why it could not be written
std::string write_flight(const std::string& run_dir, rank_id x,
                         std::span<const std::byte> image);

/// Writes the files of those ranks that have begun a session.
/// @param fd a `flight_descriptor`; -1: none
/// @returns an empty string, or why one could not be written
std::string write_flights(const std::string& run_dir, int fd,
                          rank_id first_rank, uint64_t ranks);

} // namespace smp
