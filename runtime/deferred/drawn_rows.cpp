#include "runtime/deferred/drawn_rows.hpp"

#include "runtime/deferred/boxed_call.hpp"
#include "runtime/deferred/captured_ops.hpp"
#include "runtime/deferred/deferred_tensor.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

namespace smp {

namespace {

/// An operation on all rows of a tensor, or on one.
struct row_step {
  captured_op_ptr op;
  std::optional<int64_t> row = {};
};

/// @returns the first argument if only that was captured, else null
const captured_tensor* target_of(const captured_op& op) {
  auto alone = op.holes.size() == 1 && op.holes.front().argument == 0;
  return alone ? &op.holes.front().tensor : nullptr;
}

bool is_done_to(const captured_op& op, const captured_tensor& x) {
  auto* to = target_of(op);
  return to && to->op == x.op && to->index == x.index;
}

/// @param x has as many axes and rows as `like`
/// @returns the row of `x` that the operation sets to a number; nothing if it
/// does something else
std::optional<int64_t> row_set_by(const captured_op& op,
                                  const captured_tensor& x,
                                  const at::Tensor& like) {
  auto& name = op.op.schema().name();
  auto* to = target_of(op);
  if (!to || (name != "aten::zero_" && name != "aten::fill_"))
    return std::nullopt;
  auto& view = *to->op;
  if (view.op.schema().name() != "aten::select" || !is_done_to(view, x))
    return std::nullopt;
  auto &dim = view.arguments.at(1), &row = view.arguments.at(2);
  if (!dim.isInt() || !row.isInt()
      || (dim.toInt() != 0 && dim.toInt() != -like.dim()))
    return std::nullopt;
  return row.toInt() < 0 ? row.toInt() + like.size(0) : row.toInt();
}

bool is_real_number(const c10::IValue& x) {
  if (x.isTensor())
    return x.toTensor().defined() && x.toTensor().dim() == 0
           && !x.toTensor().is_complex();
  return x.isDouble() || x.isInt();
}

/// Tells whether an operation multiplies or divides each element of its first
/// argument by a number, which leaves sizes and a floating-point type as they
/// are. (A sum is rounded in another way at the end of a piece.)
bool scales(const captured_op& op) {
  auto& name = op.op.schema().name();
  auto& xs = op.arguments;
  return target_of(op) != nullptr
         && (name == "aten::mul" || name == "aten::mul_" || name == "aten::div"
             || name == "aten::div_")
         && std::all_of(xs.begin() + 1, xs.end(), is_real_number);
}

/// @returns the draw of all of `x` and the steps after it, in order; nothing if
/// `x` is made in another way
std::vector<row_step> steps_of(const deferred_impl& x) {
  if (x.twin().dim() == 0 || !x.twin().is_contiguous())
    return {};
  std::vector<row_step> result;
  auto target = x.origin();
  for (auto op = x.memory()->last_write; op; op = op->before.front()) {
    auto row = row_set_by(*op, target, x.twin());
    result.push_back({op, row});
    if (fills_in_order(op->op.schema().name()) && is_done_to(*op, target)) {
      // A view may be filled in another order than the tensor made of it.
      if (target.op != x.origin().op
          && target.op->op.schema().name() != "aten::empty")
        return {};
      std::ranges::reverse(result);
      return result;
    }
    auto made = target.op == op; // from another tensor
    if (!row && !(scales(*op) && (made || is_done_to(*op, target))))
      return {};
    if (made)
      target = captured_tensor{*target_of(*op)};
  }
  return {};
}

/// @returns the result of the operation on `x`
at::Tensor done_again(const captured_op& op, const at::Tensor& x) {
  at::Tensor result;
  run_on(op, [&](const auto& run) { result = run(x); });
  return result;
}

} // namespace

void for_each_piece(int64_t rows, int64_t row_size,
                    const std::function<void(int64_t, int64_t)>& f) {
  // Normal numbers are made from 16 uniform ones at a time. If the last
  // group has fewer, 16 are drawn again, and fewer than 16 numbers in all
  // are made in another way.
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
  auto steps = impl ? steps_of(*impl) : std::vector<row_step>{};
  if (steps.empty() || x.numel() == 0)
    return false;
  auto sizes = x.sizes().vec();
  auto draw = [&](int64_t first, int64_t length, const auto& fill) {
    sizes[0] = length;
    auto rows = fill(at::empty(sizes, x.options()));
    for (size_t i = 1; i < steps.size(); ++i)
      if (auto& [op, row] = steps[i]; !row)
        rows = done_again(*op, rows);
      else if (*row >= first && *row < first + length)
        done_again(*op, rows.select(0, *row - first));
    f(first, rows);
  };
  run_on(*steps.front().op, [&](const auto& fill) {
    for_each_piece(
      x.size(0), x.numel() / x.size(0),
      [&](int64_t first, int64_t length) { draw(first, length, fill); });
  });
  return true;
}

} // namespace smp
