#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// A module may write into its argument, which neither a leaf nor a view of
/// one allows: it gets a tensor of its own over the same bytes, which nobody
/// else uses, with one autograd node between (R11). Copy on write (R40) would
/// do as well, but takes no memory that the fabric allocated.
at::Tensor behind_identity(const at::Tensor& leaf);

} // namespace smp
