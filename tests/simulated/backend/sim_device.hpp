#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

// Torch knows the devices as sim:0, sim:1, ...

namespace smp::sim {

constexpr auto sim_type = c10::DeviceType::PrivateUse1;

inline c10::DeviceIndex to_index(int device) {
  return static_cast<c10::DeviceIndex>(device);
}

} // namespace smp::sim
