#include "runtime/optimizer/weight_average.hpp"

#include "transport/error.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>

namespace smp {

weight_average::weight_average(double decay) : decay_(decay) {
  if (!(decay > 0 && decay < 1))
    throw config_error(fmt::format(
      "ema_decay = {} is out of range; allowed: more than 0, less than 1",
      decay));
}

void weight_average::begin(torch::optim::Optimizer& x) {
  for (auto& group : x.param_groups())
    for (auto& p : group.params())
      entries_.push_back({p, {}});
}

void weight_average::update() {
  at::NoGradGuard no_grad;
  for (auto& x : entries_)
    if (x.average.defined())
      x.average.lerp_(x.weight.detach(), 1 - decay_);
    else
      x.average = x.weight.detach().clone();
}

at::Tensor weight_average::of(const at::Tensor& weight) const {
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.weight.is_same(weight); });
  return i == entries_.end() ? at::Tensor{} : i->average;
}

void weight_average::load(const at::Tensor& weight, const at::Tensor& average) {
  for (auto& x : entries_)
    if (x.weight.is_same(weight))
      x.average = average.to(weight.device());
}

} // namespace smp
