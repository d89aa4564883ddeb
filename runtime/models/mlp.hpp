#pragma once

#include "runtime/submodule.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace smp {

/// Sizes of an `mlp`.
struct mlp_config {
  int64_t inputs = 32;
  int64_t width = 128;
  /// Hidden layers.
  int64_t layers = 2;
  int64_t outputs = 10;
};

/// @throws error (config) naming the first size that makes no sense
void validate(const mlp_config& x);

/// The smallest model that is worth a pipeline: Linear and GELU layers in a
/// Sequential, then a Linear head. Parameters: "body.0.weight", ...,
/// "head.bias". Initialised as torch::nn does, from the default generator.
struct mlp_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit mlp_impl(const mlp_config& x);

  /// x: [B, inputs] @returns logits [B, outputs]
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Sequential body;
  submodule<torch::nn::Linear> head = nullptr;
};
TORCH_MODULE_IMPL(mlp, mlp_impl);

} // namespace smp
