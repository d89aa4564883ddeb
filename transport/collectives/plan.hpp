#pragma once

// An algorithm is a pure function that makes the plan of one rank. The plans of
// a group's ranks fit together, because all of them follow from what every rank
// knows: the call, and where the ranks run.

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

#include <cstdint>

namespace smp {

/// @param self position
/// @pre `x.check` found nothing wrong
collective_plan make_plan(const collective_call& x, uint64_t self,
                          const collective_limits& limits,
                          const group_places& where);

} // namespace smp
