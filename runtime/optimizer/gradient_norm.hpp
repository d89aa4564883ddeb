#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// @returns the elements that a gradient, dense or sparse, stores
at::Tensor stored_values(const at::Tensor& gradient);

/// LibTorch adds up a norm in the type of the tensor: of some ten million
/// floats the third digit is wrong, and another one for each way to cut the
/// tensor among ranks. This adds in float64, and copies nothing of a tensor
/// without gaps.
/// @param gradient of any shape and floating or complex type, dense or sparse
/// @returns the sum of |x| * |x| over all elements x
double sum_of_squares(const at::Tensor& gradient);

} // namespace smp
