#pragma once

// Which cores of this machine are for a rank.

#include <cstdint>
#include <vector>

namespace smp {

/// @returns the numbers of the cores on which the calling thread may run, at
/// least one: a batch job, a container or a launcher gives a process only some
/// of the machine's
std::vector<uint32_t> usable_cores();

/// A launcher binds each rank to cores of its own, or leaves to all of a
/// machine what it has of it. Only the cores of all of them tell which.
/// @param own the usable cores of a rank
/// @param here those of each rank on its machine, its own as well
/// @returns how many threads it may have so that all use each core once
uint64_t share_of_cores(const std::vector<uint32_t>& own,
                        const std::vector<std::vector<uint32_t>>& here);

} // namespace smp
