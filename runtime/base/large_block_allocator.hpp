#pragma once

#include <c10/core/Allocator.h>

namespace smp {

/// Large tensors that come and go between small ones that stay leave holes in
/// the heap: the next large one does not fit by some bytes, the heap grows, and
/// nothing goes back to the system, as freed memory is kept (R27). Deferred
/// initialisation then took as much memory as the model (measured). While this
/// lives, tensors of 256 KB and more get pages of their own, on all threads,
/// and return them when they are freed, whenever that is.
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
