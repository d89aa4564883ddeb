#include "runtime/replicas/gradient_watch.hpp"

#include "runtime/model/model_map.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

namespace smp {

namespace {

/// @returns the sum of the absolute values of a few elements; 0 if none can be
/// read at low cost
double sample_of(const at::Tensor& gradient) {
  constexpr int64_t most = 16;
  if (!gradient.defined() || gradient.layout() != c10::kStrided
      || !gradient.is_contiguous() || !gradient.is_cpu()
      || gradient.numel() == 0)
    return 0;
  auto all = gradient.detach().view(-1);
  auto every = (all.numel() + most - 1) / most;
  return all.slice(0, 0, all.numel(), every)
    .to(at::kDouble)
    .abs()
    .sum()
    .item<double>();
}

} // namespace

void gradient_watch::note(const model_map& map) {
  at::NoGradGuard no_grad;
  sums_.clear();
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (map.owned(i) && !tensors[i].is_buffer)
      if (auto sum = sample_of(tensors[i].tensor.grad()); sum > 0)
        sums_.emplace(i, sum);
}

std::optional<double> gradient_watch::scaled(const model_map& map) const {
  at::NoGradGuard no_grad;
  constexpr double tolerance = 0.01;
  std::optional<double> result;
  for (auto& [tensor, before] : sums_) {
    auto factor = sample_of(map.model().tensors[tensor].tensor.grad()) / before;
    if (!std::isfinite(factor) || factor == 0
        || std::abs(factor / result.value_or(factor) - 1) > tolerance)
      return std::nullopt;
    result = result.value_or(factor);
  }
  return result && std::abs(*result - 1) > tolerance ? result : std::nullopt;
}

} // namespace smp
