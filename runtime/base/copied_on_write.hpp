#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// @returns a tensor with the content of `x`, which takes no memory until one
/// of them is written; undefined if the memory of `x` does not allow it: it
/// is on a device, comes from a file, so that there is no allocator to copy it
/// with, or does not belong to LibTorch
at::Tensor copied_on_write(const at::Tensor& x);

/// Gives `to` the content of `from`, unless its form is another one. Autograd
/// does not see it, as what has been kept for backward is to stay valid: the
/// content that it used must be there again by then.
void put_content(const at::Tensor& to, const at::Tensor& from);

} // namespace smp
