#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// A module may write into its argument in place, which autograd forbids for a
/// leaf or a view of one. The result is a separate tensor over the same bytes,
/// which has no other user, behind one autograd node (R11). Copy-on-write (R40)
/// would work too, but allocates outside the memory of the fabric.
at::Tensor writable_copy(const at::Tensor& leaf);

} // namespace smp
