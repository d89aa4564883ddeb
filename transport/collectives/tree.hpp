#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Where a group is large and there is little to send, the messages of one
/// rank to all others are what takes time. Along a binomial tree each rank
/// sends and takes about log2(n): sums go up to the root, results come down.
/// The order of additions is that of the tree, and 16-bit sums are rounded at
/// each rank. For allreduce, reduce, broadcast and barrier.
collective_plan tree_plan(const collective_call& x, uint64_t self);

} // namespace smp
