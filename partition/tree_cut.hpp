#pragma once

#include "partition/problem.hpp"

namespace smp {

/// Where requests have a price, the best assignments of a large tree keep
/// connected parts together, and those are not consecutive in the execution
/// order: moving one node after the other does not find them. This cuts the
/// tree into at most `parts` parts, the largest as small as can be, and gives
/// them to the emptiest device, the largest first. The part of the root and
/// what is pinned stay where they have to be.
/// @pre parts > 0
assignment cut_tree(const partition_problem& p, size_t parts);

} // namespace smp
