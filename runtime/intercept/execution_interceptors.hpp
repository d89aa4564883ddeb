#pragma once

namespace smp {

/// Installs what every thread that executes requests needs: order, random
/// numbers, recomputation, offload, state and activity.
void intercept_execution() noexcept;

} // namespace smp
