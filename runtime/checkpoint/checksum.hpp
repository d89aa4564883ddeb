#pragma once

#include <cstdint>
#include <string>

namespace smp {

/// XXH64 (Collet) with seed 0: detects bytes that differ from those written,
/// faster than a disk reads them. Python: `xxhash.xxh64(x).hexdigest()`.
uint64_t checksum(const void* data, uint64_t size) noexcept;

/// @returns 16 hexadecimal digits
std::string to_hex(uint64_t x);

} // namespace smp
