#pragma once

// The language model of the quickstart: GPT-2 (Radford et al. 2019) over
// tokens, with `smp::submodule` where torch::nn would have a plain holder.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, V = vocabulary.

#include "runtime/submodule.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

namespace smp {

/// Sizes of a `gpt`; the defaults are the quickstart's.
struct gpt_config {
  int64_t vocabulary = 256;
  /// Longest sequence: rows of the table of positions.
  int64_t sequence_length = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 256;
  /// Probability, at all three places where GPT-2 has one.
  double dropout = 0;
  /// The last layer uses the embedding's weight, as GPT-2 does.
  bool tied = false;
};

/// @throws error (config) naming the first size that makes no sense
void validate(const gpt_config& x);

/// Causal self-attention.
struct gpt_attention_impl : torch::nn::Module {
  explicit gpt_attention_impl(const gpt_config& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  int64_t heads;
  double dropout;
  submodule<torch::nn::Linear> c_attn; // C -> 3 C: query, key, value
  submodule<torch::nn::Linear> c_proj;
  submodule<torch::nn::Dropout> resid_dropout;
};
TORCH_MODULE_IMPL(gpt_attention, gpt_attention_impl);

/// The feed-forward half of a block, four times as wide inside.
struct gpt_mlp_impl : torch::nn::Module {
  explicit gpt_mlp_impl(const gpt_config& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> c_fc;
  submodule<torch::nn::GELU> act;
  submodule<torch::nn::Linear> c_proj;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(gpt_mlp, gpt_mlp_impl);

/// One layer: attention, then feed-forward, each with its layer norm in front
/// and added to what went in.
struct gpt_block_impl : torch::nn::Module {
  explicit gpt_block_impl(const gpt_config& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::LayerNorm> ln_1;
  submodule<gpt_attention> attn;
  submodule<torch::nn::LayerNorm> ln_2;
  submodule<gpt_mlp> mlp;
};
TORCH_MODULE_IMPL(gpt_block, gpt_block_impl);

/// Everything but the last layer.
struct gpt_transformer_impl : torch::nn::Module {
  explicit gpt_transformer_impl(const gpt_config& x);

  /// tokens: [B, T] int64, T <= sequence_length @returns [B, T, C]
  torch::Tensor forward(torch::Tensor tokens);

  submodule<torch::nn::Embedding> wte; // tokens
  submodule<torch::nn::Embedding> wpe; // positions
  submodule<torch::nn::Dropout> drop;
  /// A Sequential, so that consecutive layers on one rank are one request.
  torch::nn::Sequential h;
  submodule<torch::nn::LayerNorm> ln_f;
};
TORCH_MODULE_IMPL(gpt_transformer, gpt_transformer_impl);

/// The last layer: a Linear without bias whose weight may be another module's.
struct gpt_head_impl : torch::nn::Module {
  /// weight: [V, C], becomes this module's parameter (the same object)
  explicit gpt_head_impl(torch::Tensor weight);

  /// x: [B, T, C] @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor x);

  torch::Tensor weight;
};
TORCH_MODULE_IMPL(gpt_head, gpt_head_impl);

/// The model. Parameters are called as in the GPT-2 of Hugging Face
/// ("transformer.h.0.attn.c_attn.weight", ..., "lm_head.weight"), but the
/// weights of c_attn, c_proj and c_fc are those of `torch::nn::Linear`, [out,
/// in]; the files there hold their transpose. Initialised as GPT-2 from the
/// default generator: seed it before.
struct gpt_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit gpt_impl(const gpt_config& x);

  /// tokens: [B, T] int64, 0 <= tokens < V, T <= sequence_length
  /// @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens);

  submodule<gpt_transformer> transformer = nullptr;
  submodule<gpt_head> lm_head = nullptr;
};
TORCH_MODULE_IMPL(gpt, gpt_impl);

} // namespace smp
