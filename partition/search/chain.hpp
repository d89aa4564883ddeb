#pragma once

#include "partition/search/problem.hpp"

namespace smp {

/// Splits the nodes in preorder, which is execution order, into consecutive
/// pieces whose largest cost is as small as possible. Fixed nodes count as
/// free.
/// @param grain subtrees of at most this share of the model stay whole.
/// @param pieces at least 1; the result has fewer if there are too few nodes.
/// @returns the index of the piece of each node, from 0.
std::vector<uint32_t> split_chain(const partition_problem& p, double grain,
                                  uint32_t pieces);

} // namespace smp
