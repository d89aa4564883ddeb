#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Each rank handles an equal part of the whole: it computes the sum of that
/// part and forwards it, segment by segment, while the next ones still arrive
/// (allreduce, reduce), or takes that part from the root and forwards it
/// (broadcast). So a rank sends about twice its own data, however many ranks
/// there are. Unlike a ring, this takes two steps instead of 2 (n - 1), and the
/// parts of a sum are added in the order of the group and rounded once.
collective_plan parts_plan(const collective_call& x, uint64_t self);

/// @returns part `index` of `bytes`, cut into `parts` about equal ones, each of
/// which begins at a multiple of `piece_alignment`.
byte_range part_of(uint64_t bytes, uint64_t parts, uint64_t index);

} // namespace smp
