#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>

namespace smp {

/// Frees the bytes of a parameter or buffer that another rank owns (R14): the
/// tensor keeps its sizes, type and identity for every handle on it, but any
/// operation on it first fetches the value from its owner. In-place changes
/// of a buffer go to its owner, those of a parameter are refused by name. (A
/// meta tensor instead computes nonsense.)
/// @param gradient takes the gradient to the owner, whenever `x` requires grad,
///        and outlives `x` in its graphs; null if there never is one. It
///        stands where a leaf has the node that adds to its own gradient, which
///        without an owner would be lost silently. (A leaf, so that its
///        requires_grad can be changed.)
void make_placeholder(const at::Tensor& x,
                    const std::shared_ptr<torch::autograd::Node>& gradient);

/// Tells whether `make_placeholder` was called for `x`.
bool is_placeholder(const at::Tensor& x);

/// @returns `x` itself, an ordinary tensor now if it was a promise, or the
/// fetched value of a placeholder. Parks.
at::Tensor materialise(const at::Tensor& x);

} // namespace smp
