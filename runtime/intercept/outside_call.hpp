#pragma once

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// During a trace, says once per type if a module that is called is not part of
/// the model, so that nothing trains its parameters.
void note_outside_call(const torch::nn::Module& x);

} // namespace smp
