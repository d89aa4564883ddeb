#pragma once

// The simplest of models: vectors in, scores of classes out.

#include "runtime/train/models/model_sizes.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

namespace smp {

/// Linear layers with a ReLU between each two. A Sequential needs no change at
/// all: its children are intercepted as they are. Linear layers are children 0,
/// 2, 4, ... ("layers.0.weight").
struct mlp_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit mlp_impl(const model_sizes& x);

  /// x: [B, inputs] @returns scores [B, outputs]
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Sequential layers;
};
TORCH_MODULE_IMPL(mlp, mlp_impl);

} // namespace smp
