#pragma once

#include <c10/core/Allocator.h>

namespace smp {

/// Large tensors that come and go between small ones that stay leave holes in
/// the heap: the next large tensor misses a hole by a few bytes, the heap
/// grows, and nothing returns to the system, because freed memory is kept
/// (R27). Deferred initialisation then took as much memory as the whole model
/// (measured). While this object lives, tensors of 256 KB and more get pages of
/// their own, on all threads. These are released on free, even later.
class large_block_allocator {
public:
  large_block_allocator();

  ~large_block_allocator();

  large_block_allocator(const large_block_allocator&) = delete;
  large_block_allocator& operator=(const large_block_allocator&) = delete;

private:
  c10::Allocator* before_;
};

} // namespace smp
