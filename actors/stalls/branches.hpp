#pragma once

// Ranks that share modules and took different branches (R31). No actors, no
// clocks.

#include "actors/protocol/rank_view.hpp"

#include <vector>

namespace smp {

/// A rank that calls a shared module which its peers do not call waits for
/// ever, and they for it. Nobody knows while others still may come; so who asks
/// must know that nothing can go on.
/// @param views of all ranks
/// @returns with what the step fails, naming modules, microbatch and ranks, if
/// nothing else keeps ranks waiting; else nothing
failure different_branches(const std::vector<rank_view>& views);

} // namespace smp
