#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"

namespace smp {

/// Everybody sends to whoever needs it, in one step. That is the least that
/// can be sent for moves; for sums it is more than needed, but the quickest
/// where a message costs more than its bytes do.
collective_plan direct_plan(const collective_call& x, uint64_t self);

} // namespace smp
