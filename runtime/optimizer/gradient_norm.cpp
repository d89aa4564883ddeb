#include "runtime/optimizer/gradient_norm.hpp"

#include <ATen/Dispatch.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>

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

namespace {

double sum_on_host(at::Tensor x) {
  if (!x.is_non_overlapping_and_dense())
    x = x.contiguous();
  // A complex number is two real ones, and conjugation changes no square.
  auto n = x.is_complex() ? 2 * x.numel() : x.numel();
  return AT_DISPATCH_FLOATING_TYPES_AND2(
    at::kHalf, at::kBFloat16, c10::toRealValueType(x.scalar_type()),
    "sum_of_squares", [&] {
      return sum_of_squares(static_cast<const scalar_t*>(x.const_data_ptr()),
                            n);
    });
}

/// @returns one number of type float64, on the device of `x`
at::Tensor norm_on_device(const at::Tensor& x) {
  auto real = x.is_complex() ? at::view_as_real(x.resolve_conj()) : x;
  return at::linalg_vector_norm(real, 2, at::OptionalIntArrayRef{}, false,
                                at::kDouble);
}

/// @param xs one number each, all on the device of the rank
/// @returns them, read with one wait
std::vector<double> read(const std::vector<at::Tensor>& xs) {
  if (xs.empty())
    return {};
  auto here = at::stack(xs).to(at::kCPU, at::kDouble);
  const auto* begin = here.const_data_ptr<double>();
  return {begin, begin + xs.size()};
}

} // namespace

std::vector<double> sums_of_squares(const std::vector<at::Tensor>& gradients) {
  std::vector<double> result(gradients.size());
  std::vector<size_t> there; // on the device
  std::vector<at::Tensor> norms;
  for (size_t i = 0; i < gradients.size(); ++i)
    if (auto x = stored_values(gradients[i]); x.is_cpu()) {
      result[i] = sum_on_host(x);
    } else {
      there.push_back(i);
      norms.push_back(norm_on_device(x));
    }
  auto read_norms = read(norms);
  for (size_t k = 0; k < there.size(); ++k)
    result[there[k]] = read_norms[k] * read_norms[k];
  return result;
}

bool all_finite(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> there; // on the device
  for (auto& x : gradients) {
    auto finite = at::isfinite(stored_values(x)).all();
    if (!finite.is_cpu())
      there.push_back(finite);
    else if (!finite.item<bool>())
      return false;
  }
  return std::ranges::all_of(read(there), [](double x) { return x != 0; });
}

} // namespace smp
