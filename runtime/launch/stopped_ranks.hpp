#pragma once

#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// A process on this machine whose environment says that it is a rank.
struct rank_process {
  int64_t pid = 0;
  rank_id rank;
};

/// @returns the ranks of the run that are visible from here, with this one
std::vector<rank_process> ranks_here(const std::string& run_id);

/// A rank that a signal stopped before it joined is missed only when the join
/// timeout expires, and then only its number is known. But ranks on its machine
/// can see its process, and read its identity in its environment.
/// @returns the ranks of the run on this machine that are stopped
std::vector<rank_id> stopped_ranks_here(const std::string& run_id);

} // namespace smp
