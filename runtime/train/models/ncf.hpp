#pragma once

// Neural collaborative filtering (NeuMF, He et al. 2017): how likely is it that
// a user likes an item? A product of two embeddings and a network over two
// others, combined by the last layer: two towers that need each other only at
// the end.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>

namespace smp {

/// Sizes of a `ncf`.
struct ncf_config {
  int64_t users = 256;
  int64_t items = 256;
  /// Linear layers of the network; each halves its vectors.
  int64_t layers = 3;
  /// Width of the product's embeddings and of the network's result; the
  /// network's own embeddings are width * 2^(layers - 1) wide.
  int64_t width = 32;
  /// Probability, in front of each Linear layer.
  double dropout = 0;
};

/// Initialised as in the paper's code: embeddings normal, layers by Xavier.
struct ncf_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit ncf_impl(const ncf_config& x);

  /// users, items: [B] int64 @returns logits [B]
  torch::Tensor forward(torch::Tensor users, torch::Tensor items);

  submodule<torch::nn::Embedding> embed_user_gmf;
  submodule<torch::nn::Embedding> embed_item_gmf;
  submodule<torch::nn::Embedding> embed_user_mlp;
  submodule<torch::nn::Embedding> embed_item_mlp;
  torch::nn::Sequential mlp_layers;
  submodule<torch::nn::Linear> predict_layer;
};
TORCH_MODULE_IMPL(ncf, ncf_impl);

} // namespace smp
