#pragma once

#include "transport/device_ops.hpp"

#include <c10/core/Device.h>

#include <cstddef>
#include <span>

namespace smp {

/// Launches `device_ops::combine` on the current stream.
/// @param where the memories are
/// @throws c10::Error
void combine_on(c10::Device where, const combination& x, std::byte* to,
                std::span<const void* const> inputs);

} // namespace smp
