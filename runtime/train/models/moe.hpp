#pragma once

// A GPT whose feed-forward halves are mixtures of experts; each token goes to
// one (Switch Transformer, Fedus et al. 2021). Which experts are called depends
// on the data; an expert without tokens is not called at all.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, E experts,
// V = vocabulary.

#include "runtime/train/models/gpt.hpp"

#include <torch/nn/modules/container/moduledict.h>

#include <tuple>
#include <vector>

namespace smp {

/// One expert: Linear, ReLU, Linear, without biases.
struct moe_expert_impl : torch::nn::Module {
  explicit moe_expert_impl(const model_sizes& x);

  /// x: [tokens, C] @returns [tokens, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> wi = nullptr;
  submodule<torch::nn::Dropout> dropout;
  submodule<torch::nn::Linear> wo = nullptr;
};
TORCH_MODULE_IMPL(moe_expert, moe_expert_impl);

struct moe_router_impl : torch::nn::Module {
  explicit moe_router_impl(const model_sizes& x);

  /// x: [tokens, C] @returns probabilities of the experts [tokens, E]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> classifier;
};
TORCH_MODULE_IMPL(moe_router, moe_router_impl);

/// The experts with their router. No token is dropped, however many choose the
/// same expert.
struct moe_mlp_impl : torch::nn::Module {
  explicit moe_mlp_impl(const model_sizes& x);

  /// x: [B, T, C]
  /// @returns [B, T, C], and how unbalanced the router is (scalar, 1 if all
  /// experts get the same; Fedus et al., equation 4)
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x);

  submodule<moe_router> router;
  torch::nn::ModuleDict experts; // "expert_0", ...
  std::vector<submodule<moe_expert>> by_index;
};
TORCH_MODULE_IMPL(moe_mlp, moe_mlp_impl);

struct moe_block_impl : torch::nn::Module {
  moe_block_impl(const model_sizes& x, int64_t index);

  /// @param x [B, T, C], and the sum of the imbalances of earlier blocks
  /// @returns the same after this block
  std::tuple<torch::Tensor, torch::Tensor>
  forward(std::tuple<torch::Tensor, torch::Tensor> x);

  submodule<torch::nn::LayerNorm> ln_1;
  submodule<gpt_attention> attn;
  submodule<torch::nn::LayerNorm> ln_2;
  submodule<moe_mlp> mlp;
  submodule<torch::nn::Dropout> drop;
};
TORCH_MODULE_IMPL(moe_block, moe_block_impl);

struct moe_transformer_impl : gpt_body<moe_block> {
  using gpt_body::gpt_body;

  /// tokens: [B, T] int64
  /// @returns [B, T, C], and the mean imbalance of the blocks (scalar)
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor tokens);
};
TORCH_MODULE_IMPL(moe_transformer, moe_transformer_impl);

/// Parameters are named as in GPT-2, those of a mixture as in Hugging Face's
/// SwitchTransformersSparseMLP ("transformer.h.0.mlp.router.classifier.weight",
/// "transformer.h.0.mlp.experts.expert_0.wi.weight"). Initialised as GPT-2 from
/// the default generator.
struct moe_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit moe_impl(const model_sizes& x);

  /// tokens: [B, T] int64, T <= sequence_length
  /// @returns logits [B, T, V], and the mean imbalance of the blocks (scalar)
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor tokens);

  /// tokens, targets: [B, T] int64
  /// @returns their mean cross entropy, and the mean imbalance (scalars)
  std::tuple<torch::Tensor, torch::Tensor> loss(torch::Tensor tokens,
                                                torch::Tensor targets);

  submodule<moe_transformer> transformer = nullptr;
  std::optional<language_head> lm_head;
};
TORCH_MODULE_IMPL(moe, moe_impl);

} // namespace smp
