#include "runtime/lazy/drawn_rows.hpp"

#include "runtime/lazy/boxed_call.hpp"
#include "runtime/lazy/captured_ops.hpp"
#include "runtime/lazy/deferred_tensor.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

namespace smp {

namespace {

/// A row that was set to a number after it had been drawn, as that of a padding
/// is.
struct set_row {
  captured_op_ptr op;
  int64_t row;
};

/// What draws all of a tensor, and what is done to rows of it then, in order.
struct recipe {
  captured_op_ptr fill;
  std::vector<set_row> sets;
};

/// @returns the first argument if that alone was captured, else null
const captured_tensor* target_of(const captured_op& op) {
  auto alone = op.holes.size() == 1 && op.holes.front().argument == 0;
  return alone ? &op.holes.front().tensor : nullptr;
}

bool is_done_to(const captured_op& op, const captured_tensor& x) {
  auto* to = target_of(op);
  return to && to->op == x.op && to->index == x.index;
}

/// @returns the row of `x` that the operation sets to a number; nothing if it
/// does something else
std::optional<int64_t> row_set_by(const captured_op& op,
                                  const deferred_impl& x) {
  auto& name = op.op.schema().name();
  auto* to = target_of(op);
  if (!to || (name != "aten::zero_" && name != "aten::fill_"))
    return std::nullopt;
  auto& view = *to->op;
  if (view.op.schema().name() != "aten::select"
      || !is_done_to(view, x.origin()))
    return std::nullopt;
  auto &dim = view.arguments.at(1), &row = view.arguments.at(2);
  if (!dim.isInt() || !row.isInt()
      || (dim.toInt() != 0 && dim.toInt() != -x.dim()))
    return std::nullopt;
  return row.toInt() < 0 ? row.toInt() + x.sizes()[0] : row.toInt();
}

/// @returns nothing if `x` is made in another way
std::optional<recipe> recipe_of(const deferred_impl& x) {
  if (x.dim() == 0 || !x.twin().is_contiguous())
    return std::nullopt;
  recipe result;
  for (auto op = x.memory()->last_write; op; op = op->before.front()) {
    if (fills_in_order(op->op.schema().name()) && is_done_to(*op, x.origin())) {
      result.fill = op;
      std::ranges::reverse(result.sets);
      return result;
    }
    auto row = row_set_by(*op, x);
    if (!row)
      break;
    result.sets.push_back({op, *row});
  }
  return std::nullopt;
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
  auto how = impl ? recipe_of(*impl) : std::nullopt;
  if (!how || x.numel() == 0)
    return false;
  auto sizes = x.sizes().vec();
  auto draw = [&](int64_t first, int64_t length, const auto& fill) {
    sizes[0] = length;
    auto rows = at::empty(sizes, x.options());
    fill(rows);
    for (auto& y : how->sets)
      if (y.row >= first && y.row < first + length)
        fill_again(*y.op, [&](const auto& set) {
          set(rows.select(0, y.row - first));
        });
    f(first, rows);
  };
  fill_again(*how->fill, [&](const auto& fill) {
    for_each_piece(x.size(0), x.numel() / x.size(0),
                   [&](int64_t first, int64_t length) {
                     draw(first, length, fill);
                   });
  });
  return true;
}

} // namespace smp
