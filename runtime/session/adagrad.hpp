#pragma once

#include <memory>
#include <vector>

namespace torch::optim {
class Adagrad;
struct AdagradOptions;
class OptimizerParamGroup;
} // namespace torch::optim

namespace smp {

/// LibTorch's Adagrad makes its sums with the optimizer, of all parameters, and
/// so the bytes of those that are deferred as well. This makes one for a
/// `distributed_optimizer`: until the partition a sum is one number, and no
/// rank ever has those of what it does not update.
/// @param groups those without options have `options`
std::unique_ptr<torch::optim::Adagrad>
make_adagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const torch::optim::AdagradOptions& options);

} // namespace smp
