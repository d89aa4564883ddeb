#pragma once

// A large tensor that is filled with random numbers, some rows at a time.
// LibTorch draws them in the order in which they lie in memory, so pieces have
// the same numbers as the whole.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace smp {

/// Calls `f(first, length)` for rows that are to be drawn together, one piece
/// after the other, so that all of them draw what one call would.
/// @param row_size numbers in a row
void for_each_piece(int64_t rows, int64_t row_size,
                    const std::function<void(int64_t, int64_t)>& f);

/// Gives `f` the rows of a deferred tensor, the first one's position and
/// [any, ...], one piece after the other; nothing of them is kept, and the
/// tensor stays deferred.
/// @returns false, having done nothing, if something else made it than one
/// initialiser that draws all of it, numbers that rows were set to then, and
/// factors of all
bool draw_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f);

} // namespace smp
