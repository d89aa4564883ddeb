#pragma once

#include "transport/ids.hpp"

#include <string>
#include <vector>

namespace smp {

/// A rank that a signal stopped before it joined is missed only when the time
/// for joining is over, and nobody knows more of it than its number. But its
/// neighbours can see its process, and in its environment who it is.
/// @returns the ranks of the run on this machine that are stopped
std::vector<rank_id> stopped_ranks_here(const std::string& run_id);

} // namespace smp
