#pragma once

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class model_map;
class rank_context;

/// Looks whether an optimizer can update a distributed model (R60): it has
/// parameters of the model only, and on ranks that hold the same modules the
/// same ones, in the same groups, with the same options. Otherwise replicas
/// would drift apart, or exchange rows of different parameters. Collective over
/// the world.
/// @pre the model is partitioned, and `x` has what this rank owns
/// @throws error (config), the same on all ranks, naming group and parameter
void check_optimizer(const rank_context& rank, torch::optim::Optimizer& x,
                     const model_map& map);

} // namespace smp
