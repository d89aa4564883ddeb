#pragma once

// Which pages of some memory the kernel has given to it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace smp::test {

/// @param x begins a page
/// @returns the number of pages of `x` that nobody touched yet
inline size_t untouched_pages(void* x, uint64_t size) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((size + page - 1) / page);
  if (::mincore(x, size, resident.data()) != 0)
    throw std::runtime_error{"mincore failed"};
  return static_cast<size_t>(
    std::count_if(resident.begin(), resident.end(),
                  [](unsigned char y) { return (y & 1) == 0; }));
}

} // namespace smp::test
