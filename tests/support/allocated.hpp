#pragma once

// How much memory a test asks for. Replaces the allocator of the whole program:
// only one source of a program may include this.

#include <cstddef>
#include <cstdlib>
#include <new>

namespace smp::test {

/// By this thread, in bytes; a test sets it to 0.
inline thread_local size_t allocated = 0;

} // namespace smp::test

void* operator new(size_t size) {
  smp::test::allocated += size;
  if (auto result = std::malloc(size))
    return result;
  throw std::bad_alloc{};
}

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  smp::test::allocated += size;
  return std::malloc(size);
}

void operator delete(void* ptr) noexcept {
  std::free(ptr);
}

void operator delete(void* ptr, size_t) noexcept {
  std::free(ptr);
}
