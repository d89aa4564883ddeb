#pragma once

// Neural collaborative filtering (NeuMF, He et al. 2017): how likely is it that
// a user likes an item? A product of two embeddings and a network over two
// others, combined by the last layer: two towers that need each other only at
// the end.

#include "runtime/intercept/submodule.hpp"
#include "runtime/train/models/model_sizes.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

namespace smp {

/// Its network has `layers` Linear layers, each of which halves its vectors, to
/// `width` in the end, which is also that of the product's embeddings; the
/// network's own are width * 2^(layers - 1) wide. Dropout is in front of each
/// Linear. Initialised as in the paper's code: embeddings normal, layers by
/// Xavier.
struct ncf_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit ncf_impl(const model_sizes& x);

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
