#pragma once

// The simplest of models: vectors in, scores of classes out.

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace smp {

/// Sizes of a `mlp`.
struct mlp_config {
  int64_t inputs = 32;
  int64_t outputs = 10;
  /// Linear layers, with a ReLU between each two.
  int64_t layers = 4;
  /// Width of the vectors between them.
  int64_t width = 256;
};

/// A Sequential needs no change at all: its children are intercepted as they
/// are. Linear layers are children 0, 2, 4, ... ("layers.0.weight").
struct mlp_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit mlp_impl(const mlp_config& x);

  /// x: [B, inputs] @returns scores [B, outputs]
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Sequential layers;
};
TORCH_MODULE_IMPL(mlp, mlp_impl);

} // namespace smp
