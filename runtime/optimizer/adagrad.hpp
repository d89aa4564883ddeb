#pragma once

#include <memory>
#include <vector>

namespace torch::optim {
class Adagrad;
struct AdagradOptions;
class OptimizerParamGroup;
} // namespace torch::optim

namespace smp {

/// LibTorch's Adagrad constructor allocates its sums for all parameters, and
/// thereby the bytes of deferred parameters too. This makes an Adagrad for a
/// `distributed_optimizer`: until the partition each sum is a single number,
/// and no rank ever holds sums of parameters that it does not update.
/// @param groups those without options get `options`
std::unique_ptr<torch::optim::Adagrad>
make_adagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const torch::optim::AdagradOptions& options);

} // namespace smp
