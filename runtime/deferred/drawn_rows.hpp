#pragma once

// A large tensor that is filled with random numbers, some rows at a time.
// LibTorch draws numbers in memory order, so pieces get the same numbers
// as the whole tensor.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace smp {

/// Calls `f(first, length)` for groups of rows to draw together, one group
/// after the other, so that all of them draw what a single call would draw.
/// @param row_size numbers in a row
void for_each_piece(int64_t rows, int64_t row_size,
                    const std::function<void(int64_t, int64_t)>& f);

/// Passes the rows of a deferred tensor to `f`, one piece after the other: the
/// position of the first row, and a tensor of [any, ...]. Nothing of them is
/// kept, and the tensor stays deferred.
/// @returns false, having done nothing, unless the tensor is made by one
/// initialiser that draws all of it, and after that by nothing but setting rows
/// to numbers and scaling all elements
bool draw_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f);

} // namespace smp
