#pragma once

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Performs the update of `x.step()` in one pass over the memory of each
/// parameter, where LibTorch's optimizers make one pass per operation: Adam,
/// AdamW, Adagrad and SGD. Their state stays what LibTorch would produce, so
/// checkpoints do not depend on it. Other optimizers, and parameters that the
/// kernels do not support (sparse gradients, devices without such kernels), use
/// `x.step()`.
/// Numbers differ only in the last digits (R35).
void update_fused(torch::optim::Optimizer& x);

} // namespace smp
