#pragma once

#include "partition/search/problem.hpp"

namespace smp {

/// If requests have a price, the best assignments of a large tree keep
/// connected parts together. These are not consecutive in execution order, and
/// moving one node at a time does not find them. This function cuts the tree
/// into at most `parts` parts whose largest is as small as possible, and
/// assigns them to the emptiest device, the largest part first. The part of the
/// root and pinned nodes stay where they have to be.
/// @pre parts > 0
assignment cut_tree(const partition_problem& p, size_t parts);

} // namespace smp
