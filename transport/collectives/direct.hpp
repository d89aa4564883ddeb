#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Each rank sends to all ranks that need its data, in one step. For moves this
/// is the least that can be sent; for sums it is more than needed, but the
/// fastest way where a message costs more than its bytes do.
collective_plan direct_plan(const collective_call& x, uint64_t self);

} // namespace smp
