#include "runtime/optimizer/fused_update.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <typeinfo>
#include <vector>

namespace smp {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

/// The kernels use the memory and ignore strides.
bool is_plain(const at::Tensor& x) {
  return x.layout() == at::kStrided && x.is_contiguous()
         && x.is_floating_point();
}

/// @returns whether LibTorch has this operator for the device of `x`
bool has_kernel(const char* name, const at::Tensor& x) {
  auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  return op
         && op->hasKernelForDispatchKey(
           c10::toRuntimePerBackendFunctionalityKey(
             c10::DispatchKey::Dense, x.key_set().highestBackendKey()));
}

/// @param kernel the operator that would make the update
/// @returns whether it supports all parameters that have a gradient
bool fits(Optimizer& x, const char* kernel) {
  std::optional<at::Device> device;
  auto takes = [&](const at::Tensor& p) {
    auto& g = p.grad();
    if (!g.defined())
      return true;
    if (!device && has_kernel(kernel, p))
      device = p.device();
    return is_plain(p) && is_plain(g) && g.scalar_type() == p.scalar_type()
           && p.device() == device;
  };
  return std::ranges::all_of(x.param_groups(), [&](auto& group) {
    return std::ranges::all_of(group.params(), takes);
  });
}

/// @returns the state of a parameter in `x`, or its initial state
template <class State>
State& state_of(Optimizer& x, const at::Tensor& p) {
  auto& found = x.state()[p.unsafeGetTensorImpl()];
  if (!found)
    found = std::make_unique<State>();
  return static_cast<State&>(*found);
}

template <class State>
State& adam_state_of(Optimizer& x, const at::Tensor& p, bool amsgrad) {
  auto& result = state_of<State>(x, p);
  if (!result.exp_avg().defined()) {
    result.step(0);
    result.exp_avg(at::zeros_like(p, at::MemoryFormat::Preserve));
    result.exp_avg_sq(at::zeros_like(p, at::MemoryFormat::Preserve));
    if (amsgrad)
      result.max_exp_avg_sq(at::zeros_like(p, at::MemoryFormat::Preserve));
  }
  return result;
}

/// Numbers of steps as the kernels want them, each once.
class step_tensors {
public:
  at::Tensor of(int64_t step, at::Device device) {
    auto& result = known_[step];
    if (!result.defined())
      result = at::full({}, static_cast<double>(step),
                        at::TensorOptions{at::kFloat}.device(device));
    return result;
  }

private:
  std::map<int64_t, at::Tensor> known_;
};

/// The kernel arguments for a group. Types within one call are equal.
struct adam_lists {
  at::ScalarType type;
  std::vector<at::Tensor> values, gradients, averages, squares, most, steps;
};

struct adagrad_lists {
  std::vector<at::Tensor> values, gradients, sums, steps;
};

struct sgd_lists {
  std::vector<at::Tensor> values, gradients, momenta;
};

template <class State, class Options, class Kernel>
void update_adam(Optimizer& x, OptimizerParamGroup& group, Kernel kernel) {
  auto& options = static_cast<Options&>(group.options());
  std::vector<adam_lists> by_type;
  step_tensors steps;
  for (auto& p : group.params()) {
    if (!p.grad().defined())
      continue;
    auto& state = adam_state_of<State>(x, p, options.amsgrad());
    state.step(state.step() + 1);
    auto type = p.scalar_type();
    auto i = std::ranges::find(by_type, type, &adam_lists::type);
    if (i == by_type.end())
      i = by_type.insert(i, adam_lists{type, {}, {}, {}, {}, {}, {}});
    i->values.push_back(p);
    i->gradients.push_back(p.grad());
    i->averages.push_back(state.exp_avg());
    i->squares.push_back(state.exp_avg_sq());
    if (options.amsgrad())
      i->most.push_back(state.max_exp_avg_sq());
    i->steps.push_back(steps.of(state.step(), p.device()));
  }
  auto [beta1, beta2] = options.betas();
  for (auto& l : by_type)
    kernel(l.values, l.gradients, l.averages, l.squares, l.most, l.steps,
           options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
           options.amsgrad());
}

void update_adagrad(Optimizer& x, OptimizerParamGroup& group) {
  auto& options = static_cast<torch::optim::AdagradOptions&>(group.options());
  std::map<at::ScalarType, adagrad_lists> by_type;
  step_tensors steps;
  for (auto& p : group.params()) {
    if (!p.grad().defined())
      continue;
    auto& state = static_cast<torch::optim::AdagradParamState&>(
      *x.state().at(p.unsafeGetTensorImpl()));
    state.step(state.step() + 1);
    auto& l = by_type[p.scalar_type()];
    l.values.push_back(p);
    l.gradients.push_back(p.grad());
    l.sums.push_back(state.sum());
    l.steps.push_back(steps.of(state.step(), p.device()));
  }
  for (auto& [type, l] : by_type)
    at::_fused_adagrad_(l.values, l.gradients, l.sums, l.steps, options.lr(),
                        options.lr_decay(), options.weight_decay(),
                        options.eps(), false);
}

/// @returns whether all or none of the parameters have a momentum
bool is_even(Optimizer& x, OptimizerParamGroup& group) {
  size_t known = 0;
  size_t all = 0;
  for (auto& p : group.params())
    if (p.grad().defined()) {
      ++all;
      known += x.state().count(p.unsafeGetTensorImpl());
    }
  return known == 0 || known == all;
}

void update_sgd(Optimizer& x, OptimizerParamGroup& group) {
  auto& options = static_cast<torch::optim::SGDOptions&>(group.options());
  std::map<at::ScalarType, sgd_lists> by_type;
  auto first = false;
  for (auto& p : group.params()) {
    if (!p.grad().defined())
      continue;
    auto& l = by_type[p.scalar_type()];
    l.values.push_back(p);
    l.gradients.push_back(p.grad());
    if (options.momentum() == 0)
      continue; // there is no state
    auto& state = state_of<torch::optim::SGDParamState>(x, p);
    if (!state.momentum_buffer().defined()) {
      state.momentum_buffer(at::zeros_like(p, at::MemoryFormat::Preserve));
      first = true;
    }
    l.momenta.push_back(state.momentum_buffer());
  }
  for (auto& [type, l] : by_type)
    at::_fused_sgd_(l.values, l.gradients, l.momenta, options.weight_decay(),
                    options.momentum(), options.lr(), options.dampening(),
                    options.nesterov(), false, first);
}

bool is_fused_sgd(Optimizer& x) {
  return std::ranges::all_of(x.param_groups(), [&x](auto& group) {
    auto& options = static_cast<torch::optim::SGDOptions&>(group.options());
    return options.momentum() == 0 || is_even(x, group);
  });
}

} // namespace

void update_fused(Optimizer& x) {
  at::NoGradGuard no_grad;
  auto& type = typeid(x); // a derived class may differ
  auto adam = type == typeid(torch::optim::Adam);
  auto adamw = type == typeid(torch::optim::AdamW);
  auto adagrad = type == typeid(torch::optim::Adagrad);
  auto sgd = type == typeid(torch::optim::SGD) && is_fused_sgd(x);
  const auto* kernel = adam      ? "aten::_fused_adam_"
                       : adamw   ? "aten::_fused_adamw_"
                       : adagrad ? "aten::_fused_adagrad_"
                       : sgd     ? "aten::_fused_sgd_"
                                 : nullptr;
  if (kernel == nullptr || !fits(x, kernel)) {
    x.step();
    return;
  }
  using namespace torch::optim;
  for (auto& group : x.param_groups())
    if (sgd)
      update_sgd(x, group);
    else if (adagrad)
      update_adagrad(x, group);
    else if (adam)
      update_adam<AdamParamState, AdamOptions>(
        x, group, [](auto&&... xs) { at::_fused_adam_(xs..., false); });
    else
      update_adam<AdamWParamState, AdamWOptions>(
        x, group, [](auto&&... xs) { at::_fused_adamw_(xs..., false); });
}

} // namespace smp
