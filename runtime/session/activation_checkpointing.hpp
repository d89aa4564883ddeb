#pragma once

#include "runtime/placement/checkpointing_options.hpp"

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace torch::jit {
struct Module;
} // namespace torch::jit

namespace smp {

/// Makes backward recompute `x` instead of keeping its activations from forward
/// (docs/activation_checkpointing.md); for a Sequential, its children. Call
/// before the partition, at least on rank 0.
/// @throws error (config) if the strategy is unknown, or other than "each" for
/// a module that is not a Sequential; (unsupported) after the partition
void set_activation_checkpointing(torch::nn::Module& x,
                                  const activation_checkpointing& how = {});

/// The same for a TorchScript module. (Which modules are Sequentials is known
/// only once the model is partitioned.)
void set_activation_checkpointing(const torch::jit::Module& x,
                                  const activation_checkpointing& how = {});

} // namespace smp
