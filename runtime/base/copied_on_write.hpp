#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// @returns a tensor with the content of `x`, which takes no memory until one
/// of them is written; undefined if the memory of `x` does not allow it: it
/// is on a device, comes from a file, so that there is no allocator to copy it
/// with, or does not belong to LibTorch
at::Tensor copied_on_write(const at::Tensor& x);

} // namespace smp
