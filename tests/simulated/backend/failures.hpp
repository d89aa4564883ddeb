#pragma once

#include "tests/simulated/backend/sim_device.hpp"

namespace smp::sim {

/// What each call for a device that has failed throws, as with CUDA.
/// @throws c10::AcceleratorError
void check_device(c10::DeviceIndex);

} // namespace smp::sim
