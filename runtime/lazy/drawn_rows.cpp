#include "runtime/lazy/drawn_rows.hpp"

#include "runtime/lazy/boxed_call.hpp"
#include "runtime/lazy/captured_ops.hpp"
#include "runtime/lazy/deferred_tensor.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <numeric>

namespace smp {

namespace {

/// @returns what draws all of `x`, the last that was done to it; or null
captured_op_ptr filler_of(const deferred_impl& x) {
  auto op = x.memory()->last_write;
  if (!op || !fills_in_order(op->op.schema().name()) || op->holes.size() != 1
      || x.dim() == 0 || !x.twin().is_contiguous())
    return nullptr;
  auto& to = op->holes.front().tensor;
  auto same = to.op == x.origin().op && to.index == x.origin().index;
  return same ? op : nullptr;
}

} // namespace

void for_each_piece(int64_t rows, int64_t row_size,
                    const std::function<void(int64_t, int64_t)>& f) {
  // Normal numbers are made of 16 uniform ones at a time; where those of the
  // last time are fewer, 16 are drawn again, and fewer than 16 in all are made
  // in another way.
  constexpr int64_t together = 16, wanted = 1 << 16;
  const auto step = together / std::gcd(together, row_size);
  const auto most = std::max(step, wanted / row_size / step * step);
  for (int64_t first = 0; first < rows;) {
    auto left = rows - first;
    auto length = (left - most) * row_size < together ? left : most;
    f(first, length);
    first += length;
  }
}

bool draw_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f) {
  std::unique_lock guard{capture_mutex()};
  auto* impl = deferred(x);
  auto op = impl ? filler_of(*impl) : nullptr;
  if (!op || x.numel() == 0)
    return false;
  auto sizes = x.sizes().vec();
  fill_again(*op, [&](const auto& fill) {
    for_each_piece(x.size(0), x.numel() / x.size(0),
                   [&](int64_t first, int64_t length) {
                     sizes[0] = length;
                     auto rows = at::empty(sizes, x.options());
                     fill(rows);
                     f(first, rows);
                   });
  });
  return true;
}

} // namespace smp
