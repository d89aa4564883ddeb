#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

namespace smp::sim {

/// Memory of the current device, for the current stream.
c10::DeviceAllocator& device_allocator();

/// Pinned memory of the host. A block that was freed stays until the events
/// that were recorded on it.
at::HostAllocator& pinned_allocator();

bool is_pinned(const void*);

} // namespace smp::sim
