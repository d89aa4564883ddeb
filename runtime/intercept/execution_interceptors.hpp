#pragma once

namespace smp {

/// Installs the interceptors of a thread that executes requests: order, random
/// numbers, recomputation, offload, state and activity.
void intercept_execution() noexcept;

} // namespace smp
