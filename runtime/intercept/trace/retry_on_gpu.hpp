#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// Tells whether the model is traced on the CPU of a machine with a GPU: code
/// that fails there may run on the GPU.
bool may_retry_on_gpu();

/// Runs `f` with the module and `xs` on the GPU.
/// @returns the result of `f`, on the CPU
/// @throws any exception of `f`
std::vector<at::Tensor> retry_on_gpu(
  torch::nn::Module& module, const std::vector<at::Tensor>& xs,
  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>&
    f);

} // namespace smp
