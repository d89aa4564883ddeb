#include "runtime/optimizer/adagrad.hpp"

#include <ATen/ops/full.h>
#include <torch/optim/adagrad.h>

namespace smp {

std::unique_ptr<torch::optim::Adagrad>
make_adagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const torch::optim::AdagradOptions& options) {
  auto result = std::make_unique<torch::optim::Adagrad>(
    std::vector<torch::optim::OptimizerParamGroup>{}, options);
  for (auto& group : groups) {
    result->add_param_group(group);
    for (auto& p : group.params()) {
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(0);
      state->sum(at::full({}, options.initial_accumulator_value(),
                          p.options().requires_grad(false))
                   .expand(p.sizes()));
      result->state()[p.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  return result;
}

} // namespace smp
