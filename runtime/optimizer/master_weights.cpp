#include "runtime/optimizer/master_weights.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace smp {

namespace {

uint64_t version_of(const at::Tensor& x) {
  return static_cast<uint64_t>(x._version());
}

/// Adagrad's constructor allocates its sums, with the type of the parameters.
void widen_sums(torch::optim::OptimizerParamState& x,
                torch::optim::OptimizerOptions& options) {
  auto* sums = dynamic_cast<torch::optim::AdagradParamState*>(&x);
  if (sums == nullptr || !sums->sum().defined())
    return;
  sums->sum(sums->sum().to(at::kFloat));
  auto* of_adagrad = dynamic_cast<torch::optim::AdagradOptions*>(&options);
  if (of_adagrad != nullptr && sums->step() == 0)
    sums->sum().fill_(of_adagrad->initial_accumulator_value());
}

} // namespace

void master_weights::replace(torch::optim::Optimizer& x) {
  at::NoGradGuard no_grad;
  for (auto& group : x.param_groups())
    for (auto& p : group.params()) {
      if (!c10::isReducedFloatingType(p.scalar_type()))
        continue;
      auto master = p.detach().to(at::kFloat).set_requires_grad(true);
      if (auto old = x.state().find(p.unsafeGetTensorImpl());
          old != x.state().end()) {
        auto state = std::move(old->second);
        x.state().erase(old);
        widen_sums(*state, group.options());
        x.state()[master.unsafeGetTensorImpl()] = std::move(state);
      }
      entries_.push_back({p, master, version_of(p)});
      p = std::move(master);
    }
}

void master_weights::follow_parameters() {
  at::NoGradGuard no_grad;
  for (auto& x : entries_)
    if (version_of(x.parameter) != x.version)
      x.master.copy_(x.parameter);
}

void master_weights::begin_update() {
  follow_parameters();
  at::NoGradGuard no_grad;
  for (auto& x : entries_) {
    auto& gradient = x.parameter.grad();
    x.master.mutable_grad() = gradient.defined() ? gradient.to(at::kFloat)
                                                 : at::Tensor{};
  }
}

void master_weights::end_update(bool updated) {
  at::NoGradGuard no_grad;
  for (auto& x : entries_) {
    auto changed = x.master.grad().defined();
    x.master.mutable_grad().reset();
    if (updated && changed)
      x.parameter.copy_(x.master);
  }
}

void master_weights::note_values() {
  for (auto& x : entries_)
    x.version = version_of(x.parameter);
}

void master_weights::zero_grad() {
  for (auto& x : entries_)
    x.parameter.mutable_grad().reset();
}

at::Tensor master_weights::master_of(const at::Tensor& x) const {
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.parameter.is_same(x); });
  return i == entries_.end() ? x : i->master;
}

at::Tensor master_weights::parameter_of(const at::Tensor& x) const {
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.master.is_same(x); });
  return i == entries_.end() ? x : i->parameter;
}

void master_weights::load(const at::Tensor& master, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.master.is_same(master); });
  if (i == entries_.end())
    return;
  i->master.copy_(value);
  i->version = version_of(i->parameter);
}

} // namespace smp
