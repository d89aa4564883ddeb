#pragma once

#include <cstddef>
#include <cstdint>

namespace smp::sim {

/// @throws std::runtime_error that says what failed, and errno
[[noreturn]] void fail(const char* what);

/// @returns a file without a place, of zeros
int make_shared_file(const char* name, size_t size);

/// @returns the same file as the other process's descriptor
int open_shared_file(int32_t process, int32_t descriptor);

} // namespace smp::sim
