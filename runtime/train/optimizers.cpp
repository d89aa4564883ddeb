#include "runtime/train/optimizers.hpp"

#include "runtime/optimizer/adagrad.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "transport/error.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <numbers>
#include <unordered_set>

namespace optim = torch::optim;

namespace smp {

namespace {

struct parameter_groups {
  std::vector<at::Tensor> decayed;
  std::vector<at::Tensor> others;
};

parameter_groups split_parameters(const std::vector<at::Tensor>& xs) {
  parameter_groups result;
  std::unordered_set<const void*> seen;
  for (auto& x : xs)
    if (seen.insert(x.unsafeGetTensorImpl()).second)
      (x.dim() >= 2 ? result.decayed : result.others).push_back(x);
  return result;
}

/// @param options of LibTorch, complete except for the weight decay
template <class Options>
std::vector<optim::OptimizerParamGroup>
make_groups(const optimizer_config& x,
            const std::vector<at::Tensor>& parameters, const Options& options) {
  auto groups = split_parameters(parameters);
  auto with_decay = [&](double decay) {
    auto result = std::make_unique<Options>(options);
    result->weight_decay(decay);
    return result;
  };
  std::vector<optim::OptimizerParamGroup> result;
  result.emplace_back(groups.decayed, with_decay(x.weight_decay.value_or(
                                        options.weight_decay())));
  result.emplace_back(groups.others, with_decay(0));
  return result;
}

template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer>
make(const optimizer_config& x, const std::vector<at::Tensor>& parameters,
     const Options& options) {
  return std::make_unique<Optimizer>(make_groups(x, parameters, options),
                                     options);
}

template <class Options>
Options adam_options(const optimizer_config& x) {
  Options result{x.lr};
  result.betas({x.betas[0], x.betas[1]});
  result.eps(x.eps.value_or(result.eps()));
  return result;
}

} // namespace

std::unique_ptr<optim::Optimizer>
make_optimizer(const optimizer_config& x,
               const std::vector<at::Tensor>& parameters, bool distributed) {
  if (x.type == "adamw")
    return make<optim::AdamW>(x, parameters,
                              adam_options<optim::AdamWOptions>(x));
  if (x.type == "adam")
    return make<optim::Adam>(x, parameters,
                             adam_options<optim::AdamOptions>(x));
  if (x.type == "sgd") {
    optim::SGDOptions options{x.lr};
    options.momentum(x.momentum);
    return make<optim::SGD>(x, parameters, options);
  }
  if (x.type == "adagrad") {
    optim::AdagradOptions options{x.lr};
    options.eps(x.eps.value_or(options.eps()));
    if (distributed)
      return make_adagrad(make_groups(x, parameters, options), options);
    return make<optim::Adagrad>(x, parameters, options);
  }
  throw error{error_code::config, "optimizer.type: unknown '" + x.type + "'"};
}

optimizer_options options_of(const train_config& config) {
  auto x = effective(config).optimizer;
  optimizer_options result;
  result.dynamic_loss_scale = x.loss_scale->dynamic;
  if (!x.loss_scale->dynamic
      && (x.loss_scale->fixed != 1 || config.smp.fp16_params))
    result.static_loss_scale = x.loss_scale->fixed;
  auto& args = x.dynamic_loss_args;
  result.ema_decay = x.ema_decay;
  result.fused = x.fused;
  result.dynamic_loss_args = {args.init_scale, args.scale_factor,
                              args.scale_window, args.min_scale};
  return result;
}

double learning_rate(const optimizer_config& x, uint64_t step, uint64_t steps) {
  auto& schedule = x.schedule;
  auto real = [](uint64_t n) { return static_cast<double>(n); };
  if (step < schedule.warmup_steps)
    return x.lr * real(step + 1) / real(schedule.warmup_steps);
  if (schedule.type == "constant")
    return x.lr;
  // Falls from the last step of the warm-up, or from the first step.
  const auto top = schedule.warmup_steps > 0 ? schedule.warmup_steps - 1 : 0;
  const auto way = steps - 1 > top ? real(step - top) / real(steps - 1 - top)
                                   : 0.0;
  const auto left = schedule.type == "linear"
                      ? 1 - way
                      : 0.5 * (1 + std::cos(std::numbers::pi * way));
  return schedule.final_lr + (x.lr - schedule.final_lr) * left;
}

void set_learning_rate(optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups())
    group.options().set_lr(rate);
}

} // namespace smp
