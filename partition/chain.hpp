#pragma once

#include "partition/problem.hpp"

namespace smp {

/// Splits the nodes in preorder, which is the order of execution, into
/// consecutive pieces whose largest cost is as small as possible; fixed nodes
/// cost nothing here.
/// @param grain subtrees of at most this share of the model stay whole.
/// @param pieces at least 1; fewer come out if there is not enough to split.
/// @returns the piece of each node, from 0.
std::vector<uint32_t> split_chain(const partition_problem& p, double grain,
                                  uint32_t pieces);

} // namespace smp
