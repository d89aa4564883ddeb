#pragma once

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Makes the update that `x.step()` makes, with one pass over the memory of
/// each parameter where LibTorch's optimizers make one for each operation:
/// Adam, AdamW, Adagrad and SGD. What they remember stays what they would have
/// made, so that checkpoints do not depend on it. Others, and parameters that
/// the kernels do not take (sparse gradients, other devices), go the plain way.
/// Numbers differ in the last places only (R35).
void update_fused(torch::optim::Optimizer& x);

} // namespace smp
