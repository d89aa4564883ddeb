#include "runtime/optimizer/gradient_norm.hpp"

#include <ATen/Dispatch.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <unordered_map>
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

/// Numbers of devices, read with one wait.
class numbers_of_devices {
public:
  void add(size_t index, at::Tensor x) {
    auto& of_device = by_device_[x.device()];
    of_device.indices.push_back(index);
    of_device.numbers.push_back(std::move(x));
  }

  /// @param f gets each index with its number
  template <class F>
  void read(F f) const {
    for (auto& [device, x] : by_device_) {
      auto here = at::stack(x.numbers).to(at::kCPU, at::kDouble);
      const auto* values = here.template const_data_ptr<double>();
      for (size_t i = 0; i < x.indices.size(); ++i)
        f(x.indices[i], values[i]);
    }
  }

private:
  struct entry {
    std::vector<size_t> indices;
    std::vector<at::Tensor> numbers;
  };

  std::unordered_map<at::Device, entry> by_device_;
};

} // namespace

std::vector<double> sums_of_squares(const std::vector<at::Tensor>& gradients) {
  std::vector<double> result(gradients.size());
  numbers_of_devices others;
  for (size_t i = 0; i < gradients.size(); ++i)
    if (auto x = stored_values(gradients[i]); x.is_cpu())
      result[i] = sum_on_host(x);
    else
      others.add(i, norm_on_device(x));
  others.read([&](size_t i, double norm) { result[i] = norm * norm; });
  return result;
}

bool all_finite(const std::vector<at::Tensor>& gradients) {
  bool result = true;
  numbers_of_devices others;
  for (auto& x : gradients) {
    auto finite = at::isfinite(stored_values(x)).all();
    if (!finite.is_cpu())
      others.add(0, finite);
    else if (!finite.item<bool>())
      return false;
  }
  others.read([&](size_t, double finite) { result = result && finite != 0; });
  return result;
}

} // namespace smp
