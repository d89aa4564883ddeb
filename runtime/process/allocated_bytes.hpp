#pragma once

#include <cstdint>

namespace smp {

/// @returns bytes that this process has allocated and not freed
uint64_t allocated_bytes();

} // namespace smp
