#include "runtime/verify/tensor_compare.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/view_as_real.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace smp {

namespace {

std::string shape_text(const at::Tensor& x) {
  return fmt::format("{} [{}]", c10::toString(x.scalar_type()),
                     fmt::join(x.sizes(), ", "));
}

/// Numbers of any type as doubles; complex ones become pairs.
at::Tensor numbers_of(const at::Tensor& x) {
  auto y = x.detach().to(at::kCPU);
  if (!y.is_complex())
    return y.to(at::kDouble).contiguous();
  return at::view_as_real(y.resolve_conj().to(at::kComplexDouble)).contiguous();
}

std::string index_text(int64_t i, at::IntArrayRef sizes) {
  std::vector<int64_t> result(sizes.size());
  for (auto k = sizes.size(); k-- > 0;) {
    result[k] = i % sizes[k];
    i /= sizes[k];
  }
  return result.empty() ? "the value"
                        : fmt::format("element [{}]", fmt::join(result, ", "));
}

/// @param allowed the bound at an index
template <class Bound>
comparison compare(const at::Tensor& a, const at::Tensor& b, Bound allowed) {
  comparison result;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    result.relative = result.share = infinity;
    result.wrong = {"the shape", shape_text(a), shape_text(b), infinity, 0};
    return result;
  }
  auto x = numbers_of(a), y = numbers_of(b);
  auto* p = x.const_data_ptr<double>();
  auto* q = y.const_data_ptr<double>();
  auto n = x.numel();
  double largest = 0, far = 0;
  for (int64_t i = 0; i < n; ++i)
    if (std::isfinite(q[i]))
      largest = std::max(largest, std::abs(q[i]));
  // The worst place is where the bound is exceeded most.
  double worst = 0;
  int64_t at = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (p[i] == q[i] || (std::isnan(p[i]) && std::isnan(q[i])))
      continue;
    auto d = std::abs(p[i] - q[i]);
    if (!std::isfinite(d))
      d = infinity;
    far = std::max(far, d);
    auto limit = allowed(i, largest);
    result.share = std::max(result.share, d / limit);
    auto excess = d - limit;
    if (excess > worst) {
      worst = excess;
      at = i;
    }
  }
  result.relative = far == 0 ? 0 : largest > 0 ? far / largest : infinity;
  if (at >= 0) {
    auto d = std::abs(p[at] - q[at]);
    result.wrong = {index_text(at, x.sizes()), number_text(p[at]),
                    number_text(q[at]), std::isnan(d) ? infinity : d,
                    allowed(at, largest)};
  }
  return result;
}

} // namespace

tolerance tolerance_for(c10::ScalarType x) {
  switch (x) {
    // Units in the last place: 2^-10 and 2^-7. One of bfloat16 was off
    // by 4.1 on a processor that multiplies it itself.
    case c10::ScalarType::Half:
      return {4 * 0x1p-10, 1e-4};
    case c10::ScalarType::BFloat16:
      return {6 * 0x1p-7, 1e-3};
    default:
      return {};
  }
}

tolerance wider(const tolerance& x, const tolerance& y) {
  return {std::max(x.relative, y.relative), std::max(x.absolute, y.absolute)};
}

comparison compare_tensors(const at::Tensor& a, const at::Tensor& b,
                           const tolerance& x) {
  return compare(a, b,
                 [&x](int64_t, double largest) { return x.bound(largest); });
}

comparison compare_update(const at::Tensor& a, const at::Tensor& b,
                          const at::Tensor& before) {
  auto moved = numbers_of(b.detach() - before.detach()).abs();
  auto* p = moved.const_data_ptr<double>();
  double far = 0;
  for (int64_t i = 0; i < moved.numel(); ++i)
    if (std::isfinite(p[i]))
      far = std::max(far, p[i]);
  auto place = c10::isReducedFloatingType(b.scalar_type()) ? 0x1p-7 : 0x1p-22;
  return compare(a, b, [&](int64_t, double largest) {
    return place * largest + 1e-5 * far;
  });
}

std::optional<mismatch> compare_numbers(double a, double b,
                                        const tolerance& allowed) {
  auto bound = allowed.bound(std::abs(b));
  auto close = std::isfinite(b) && std::abs(a - b) <= bound;
  if (a == b || (std::isnan(a) && std::isnan(b)) || close)
    return std::nullopt;
  return mismatch{"", number_text(a), number_text(b), std::abs(a - b), bound};
}

std::string number_text(double x) {
  return fmt::format("{:.9g}", x);
}

} // namespace smp
