#include "runtime/session/distributed_optimizer.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace smp {

namespace {

/// Drops placeholders and all but the first mention of tied ones.
void keep_owned(torch::optim::Optimizer& x) {
  std::set<const void*> seen;
  for (auto& group : x.param_groups()) {
    auto drop = [&seen](const at::Tensor& p) {
      return is_placeholder(p) || !seen.insert(p.unsafeGetTensorImpl()).second;
    };
    std::erase_if(group.params(), drop);
  }
}

std::vector<at::Tensor> owned_gradients(distributed_model_base& model) {
  std::vector<at::Tensor> result;
  for (auto& p : model.local_parameters())
    if (p.grad().defined())
      result.push_back(p.grad());
  return result;
}

double sum_over_pipeline(const char* what, double x) {
  auto& rank = session::current().internals();
  return rank.exchange().all_reduce_sum(rank.pipeline(), what, {x}).front();
}

} // namespace

distributed_optimizer::distributed_optimizer(torch::optim::Optimizer& x)
  : optimizer_(x), alive_(std::make_shared<bool>(true)) {
  auto& model = session::current().internals().state();
  if (!model)
    throw error{error_code::unsupported,
                "a distributed_optimizer needs a distributed_model before it"};
  model->on_partition([this, alive = std::weak_ptr{alive_}] {
    if (alive.lock())
      keep_owned(optimizer_);
  });
}

void distributed_optimizer::step() {
  session::current().internals().check_alive();
  optimizer_.step();
}

void distributed_optimizer::zero_grad() {
  optimizer_.zero_grad();
}

double clip_grad_norm_(distributed_model_base& model, double max_norm) {
  at::NoGradGuard no_grad;
  auto grads = owned_gradients(model);
  auto squares = 0.0;
  for (auto& g : grads) {
    auto norm = g.norm().item<double>();
    squares += norm * norm;
  }
  if (SMP_FAULT("doubled-norm"))
    squares *= 2;
  auto total = std::sqrt(sum_over_pipeline("smp.clip_grad_norm", squares));
  auto factor = max_norm / (total + 1e-6);
  // As torch does: never enlarge; NaN goes through and shows.
  if (!(factor >= 1.0))
    for (auto& g : grads)
      g.mul_(factor);
  return total;
}

bool any_nonfinite(distributed_model_base& model) {
  at::NoGradGuard no_grad;
  auto grads = owned_gradients(model);
  auto bad = std::any_of(grads.begin(), grads.end(), [](const auto& g) {
    return !at::isfinite(g).all().template item<bool>();
  });
  return sum_over_pipeline("smp.any_nonfinite", bad ? 1.0 : 0.0) > 0;
}

} // namespace smp
