#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace smp {

/// Frees the bytes of a parameter or buffer that another rank owns (R14): the
/// tensor keeps its sizes, type and identity for every handle on it, but any
/// operation on it first fetches the value from its owner. In-place changes
/// are refused by name. (A meta tensor instead computes nonsense.)
void release_tensor(const at::Tensor& x);

/// Tells whether `release_tensor` was called for `x`.
bool is_released(const at::Tensor& x);

/// @returns `x` itself, or the fetched value of a released tensor. Parks.
at::Tensor materialise(const at::Tensor& x);

} // namespace smp
