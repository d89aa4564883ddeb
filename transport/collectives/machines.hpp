#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// For groups with several ranks on a machine: data crosses the network once
/// per machine and direction, not once per rank. Sums are computed inside each
/// machine first, and data from other machines is forwarded inside. As in
/// `parts_plan`, each rank handles a part of the whole, so that all ranks of a
/// machine share the work of sending over the network.
///
/// Sums are added up machine by machine, in the order of the group inside each;
/// 16-bit sums are rounded once per machine and at the end. For allreduce,
/// reduce, reduce_scatter, broadcast and allgather.
collective_plan machines_plan(const collective_call& x, uint64_t self,
                              const group_places& where);

} // namespace smp
