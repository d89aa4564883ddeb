#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Where several ranks of a group share a machine, whatever crosses the cable
/// does so once per machine and direction, not once per rank: sums are made
/// inside each machine first, what comes from outside is handed on inside. As
/// in `parts_plan`, each rank deals with a part of the whole, so that all of a
/// machine take part in what goes over the cable.
///
/// Sums are added up machine by machine, in the order of the group inside each;
/// 16-bit sums are rounded once per machine and at the end. For allreduce,
/// reduce, reduce_scatter, broadcast and allgather.
collective_plan machines_plan(const collective_call& x, uint64_t self,
                              const group_places& where);

} // namespace smp
