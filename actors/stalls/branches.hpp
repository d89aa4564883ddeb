#pragma once

// Detects ranks that share modules but took different branches (R31). No
// actors, no clocks.

#include "actors/protocol/rank_view.hpp"

#include <vector>

namespace smp {

/// If a rank calls a shared module that its peers do not call, it waits
/// forever, and they wait for it. While other calls may still come, no rank can
/// know this; so the caller must know that nothing can proceed.
/// @param views of all ranks
/// @returns the failure for the step, naming modules, microbatch and ranks, if
/// nothing else keeps ranks waiting; otherwise nothing
failure different_branches(const std::vector<rank_view>& views);

} // namespace smp
