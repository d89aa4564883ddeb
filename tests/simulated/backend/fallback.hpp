#pragma once

#include "tests/simulated/backend/operator_call.hpp"

namespace smp::sim {

/// Runs an operator that has no code of its own: queues Torch's CPU kernel on
/// the current stream and returns at once, if the shapes of the results are
/// known. They are asked of the meta kernel, or remembered of the first call
/// with such arguments, which waits. What returns numbers, or results of a size
/// that depends on values, waits always, as on a GPU.
void fallback(const c10::OperatorHandle&, value_stack*);

} // namespace smp::sim
