#pragma once

// Converts what peers exchange to and from the layout of tensor collectives: by
// peer along axis 0.

#include "tp/tensor_group.hpp"
#include "transport/error.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <string>

namespace smp::nn {

/// [..., T n, ...] -> [T, ..., n, ...], a view if that is possible
inline at::Tensor slices_of(const at::Tensor& x, int64_t dim, uint64_t peers) {
  auto n = static_cast<int64_t>(peers);
  if (x.size(dim) % n != 0)
    throw error{error_code::user_code,
                "axis " + std::to_string(dim) + " of size "
                  + std::to_string(x.size(dim)) + " cannot be divided among "
                  + std::to_string(n) + " tensor-parallel ranks"};
  return dim == 0 ? x.contiguous().unflatten(0, {n, x.size(0) / n})
                  : at::stack(x.chunk(n, dim));
}

/// [T, ..., n, ...] -> [..., T n, ...], a view if that is possible
inline at::Tensor merged(const at::Tensor& x, int64_t dim) {
  return dim == 0 ? x.flatten(0, 1) : at::cat(x.unbind(0), dim);
}

} // namespace smp::nn
