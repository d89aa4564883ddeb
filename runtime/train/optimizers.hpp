#pragma once

// The optimizers that a configuration can name, and their learning rate.

#include "runtime/config/config_file.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

struct optimizer_options;

/// Makes the optimizer of `x` with two groups: tensors with two or more
/// dimensions, and the rest (biases, norms), which gets no weight decay. A
/// tensor that is listed several times is used once (R17).
/// @param distributed for use in a `distributed_optimizer`: Adagrad then comes
///        from `make_adagrad`
std::unique_ptr<torch::optim::Optimizer>
make_optimizer(const optimizer_config& x,
               const std::vector<at::Tensor>& parameters,
               bool distributed = false);

/// @returns what the configuration says about the `distributed_optimizer`
optimizer_options options_of(const train_config& config);

/// @returns the rate of step `step` (from 0) of `steps`: it rises linearly to
/// `lr`, reached in the last step of the warm-up, then stays or falls to
/// `final_lr`, reached in the last step.
double learning_rate(const optimizer_config& x, uint64_t step, uint64_t steps);

/// Sets the rate of all groups.
void set_learning_rate(torch::optim::Optimizer& optimizer, double rate);

} // namespace smp
