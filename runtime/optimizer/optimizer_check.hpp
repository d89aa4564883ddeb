#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class model_map;
class rank_context;
struct walked_model;

/// LibTorch's optimizers, except SGD, move only the real part of a complex
/// parameter, without a word.
/// @throws error (config) naming a complex parameter that is trained
void refuse_complex_parameters(const walked_model& model);

/// Checks that an optimizer can update a distributed model (R60): it has only
/// parameters of the model, and ranks that hold the same modules have the same
/// parameters, in the same groups, with the same options. Otherwise replicas
/// would diverge, or exchange rows of different parameters. Collective over the
/// world.
/// @pre the model is partitioned, and `x` has the parameters of this rank
/// @throws error (config), the same on all ranks, naming group and parameter
void check_optimizer(const rank_context& rank, torch::optim::Optimizer& x,
                     const model_map& map);

/// An `Embedding` with `sparse` is found by `check_optimizer`; this finds any
/// other sparse gradient, before the update: LibTorch's optimizers throw in the
/// middle of it, without a parameter's name.
/// @param name_of the parameter that a tensor in a group is, or is part of
/// @throws error (config) naming a parameter whose gradient the optimizer does
/// not take
void refuse_sparse_gradients(
  torch::optim::Optimizer& x,
  const std::function<std::string(const at::Tensor&)>& name_of);

} // namespace smp
