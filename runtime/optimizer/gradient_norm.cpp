#include "runtime/optimizer/gradient_norm.hpp"

#include <ATen/Dispatch.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <numeric>

namespace smp {

namespace {

/// In many sums at a time: additions to a single one wait for each other.
template <class T>
double sum_of_squares(const T* xs, int64_t n) {
  constexpr int64_t lanes = 16;
  auto square = [](T x) {
    auto wide = static_cast<double>(x);
    return wide * wide;
  };
  std::array<double, lanes> sums{};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int64_t k = 0; k < lanes; ++k)
      sums[k] += square(xs[i + k]);
  for (; i < n; ++i)
    sums[0] += square(xs[i]);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

} // namespace

at::Tensor stored_values(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.coalesce().values() : gradient;
}

double sum_of_squares(const at::Tensor& gradient) {
  auto x = stored_values(gradient);
  if (!x.is_non_overlapping_and_dense())
    x = x.contiguous();
  if (!x.is_cpu()) {
    auto real = x.is_complex() ? at::view_as_real(x.resolve_conj()) : x;
    return real.to(at::kDouble).square().sum().item<double>();
  }
  // A complex number is two real ones, and conjugation changes no square.
  auto n = x.is_complex() ? 2 * x.numel() : x.numel();
  return AT_DISPATCH_FLOATING_TYPES_AND2(
    at::kHalf, at::kBFloat16, c10::toRealValueType(x.scalar_type()),
    "sum_of_squares", [&] {
      return sum_of_squares(static_cast<const scalar_t*>(x.const_data_ptr()),
                            n);
    });
}

} // namespace smp
