#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// In a large group with little to send, the time goes into the messages of one
/// rank to all others. Along a binomial tree each rank sends and receives about
/// log2(n) messages: sums go up to the root, results come down. Additions
/// follow the order of the tree, and 16-bit sums are rounded at each rank. For
/// allreduce, reduce, broadcast and barrier.
collective_plan tree_plan(const collective_call& x, uint64_t self);

} // namespace smp
