#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Each rank deals with an equal part of the whole: it makes the sum of that
/// part and hands it on, segment by segment, while the next ones still come
/// (allreduce, reduce), or takes that part from the root and hands it on
/// (broadcast). So a rank sends about twice what it has, however many there
/// are. Other than along a ring, there are two steps instead of 2 (n - 1), and
/// the parts of a sum are added up in the order of the group and rounded once.
collective_plan parts_plan(const collective_call& x, uint64_t self);

/// @returns one of so many parts of `bytes`, about equal, each beginning as
/// `piece_alignment` says.
byte_range part_of(uint64_t bytes, uint64_t parts, uint64_t index);

} // namespace smp
