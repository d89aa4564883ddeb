#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

/// @returns the elements that a gradient, dense or sparse, stores
at::Tensor stored_values(const at::Tensor& gradient);

/// LibTorch adds up a norm in the type of the tensor: of some ten million
/// floats the third digit is wrong, and another one for each way to cut the
/// tensor among ranks. This adds in float64, and copies nothing of a tensor
/// without gaps.
/// Of gradients on a device all sums are read at once.
/// @param gradients of any shape and floating or complex type, dense or sparse
/// @returns the sum of |x| * |x| over all elements x, of each
std::vector<double> sums_of_squares(const std::vector<at::Tensor>& gradients);

/// Waits for the device at most once.
/// @returns whether all elements of all gradients are finite
bool all_finite(const std::vector<at::Tensor>& gradients);

} // namespace smp
