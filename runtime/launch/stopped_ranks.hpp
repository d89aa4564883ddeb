#pragma once

#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// A process on this machine that is a rank, as its environment says.
struct rank_process {
  int64_t pid = 0;
  rank_id rank;
};

/// @returns the ranks of the run that can be seen from here, this one as well
std::vector<rank_process> ranks_here(const std::string& run_id);

/// A rank that a signal stopped before it joined is missed only when the time
/// for joining is over, and nobody knows more of it than its number. But its
/// neighbours can see its process, and in its environment who it is.
/// @returns the ranks of the run on this machine that are stopped
std::vector<rank_id> stopped_ranks_here(const std::string& run_id);

} // namespace smp
