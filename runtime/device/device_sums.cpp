#include "runtime/device/device_sums.hpp"

#include "transport/error.hpp"

#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>
#include <vector>

namespace smp {

namespace {

c10::ScalarType scalar_type(element_type x) {
  switch (x) {
    case element_type::uint8:
      return at::kByte;
    case element_type::int8:
      return at::kChar;
    case element_type::int16:
      return at::kShort;
    case element_type::int32:
      return at::kInt;
    case element_type::int64:
      return at::kLong;
    case element_type::float16:
      return at::kHalf;
    case element_type::bfloat16:
      return at::kBFloat16;
    case element_type::float32:
      return at::kFloat;
    case element_type::float64:
      return at::kDouble;
    default:
      throw error{error_code::internal,
                  std::string{"no sum of "} + to_string(x)};
  }
}

/// The larger one of each two numbers; of equal ones the first, as of zeros
/// with a sign, and NaN if one is.
at::Tensor larger(const at::Tensor& x, const at::Tensor& y) {
  if (!x.is_floating_point())
    return at::maximum(x, y);
  return at::where(at::logical_or(at::gt(y, x), at::ne(y, y)), y, x);
}

bool is_narrow(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
}

/// @returns the sum, in the order of `xs`, perhaps in `into`
at::Tensor sum_of(const std::vector<at::Tensor>& xs, at::Tensor into) {
  // A later input would be overwritten, and 16 bits are rounded once.
  auto apart = is_narrow(into)
               || std::any_of(xs.begin() + 2, xs.end(), [&](auto& x) {
                    return x.const_data_ptr() == into.const_data_ptr();
                  });
  if (is_narrow(into))
    into = xs[0].to(at::kFloat).add_(xs[1]);
  else if (apart)
    into = at::add(xs[0], xs[1]);
  else
    at::add_out(into, xs[0], xs[1]);
  for (size_t i = 2; i < xs.size(); ++i)
    into.add_(xs[i]);
  return into;
}

} // namespace

void combine_on(c10::Device where, const combination& x, std::byte* to,
                std::span<const void* const> inputs) {
  c10::AutoGradMode off{false};
  auto options = at::TensorOptions{scalar_type(x.type)}.device(where);
  auto at = [&](const void* data) {
    return at::for_blob(const_cast<void*>(data),
                        {static_cast<int64_t>(x.count)})
      .options(options)
      .target_device(where)
      .make_tensor();
  };
  std::vector<at::Tensor> xs;
  for (auto* data : inputs)
    xs.push_back(at(data));
  auto output = at(to);
  auto result = xs[0];
  if (x.op == reduce_op::max)
    for (size_t i = 1; i < xs.size(); ++i)
      result = larger(result, xs[i]);
  else if (xs.size() > 1)
    result = sum_of(xs, output);
  // A number of the host would be a factor on a GPU, with other bits.
  if (x.divisor)
    result.div_(
      at::full({}, static_cast<int64_t>(*x.divisor), result.options()));
  if (result.const_data_ptr() != output.const_data_ptr())
    output.copy_(result);
}

} // namespace smp
