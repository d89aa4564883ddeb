#pragma once

#include "runtime/session/checkpointing_options.hpp"

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace torch::jit {
struct Module;
} // namespace torch::jit

namespace smp {

/// Backward computes `x` again, instead of keeping what it computes in forward
/// (docs/activation_checkpointing.md); of a Sequential, its children. Before
/// the partition, on rank 0 at least.
/// @throws error (config) if the strategy is unknown, or nothing but "each" for
/// what is no Sequential; (unsupported) after the partition
void set_activation_checkpointing(torch::nn::Module& x,
                                  const activation_checkpointing& how = {});

/// The same of a TorchScript module. (Which is a Sequential shows when the
/// model is partitioned.)
void set_activation_checkpointing(const torch::jit::Module& x,
                                  const activation_checkpointing& how = {});

} // namespace smp
