#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace smp {

/// Rows of a parameter or its gradient along the first axis, as a view; a
/// tensor without axes is one row.
at::Tensor rows_of(const at::Tensor& x, int64_t begin, int64_t end);

/// The same for a gradient; of a sparse one it is a copy.
at::Tensor rows_of_gradient(const at::Tensor& x, int64_t begin, int64_t end);

} // namespace smp
