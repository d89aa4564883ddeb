#pragma once

// The language model of the quickstart: GPT-2 (Radford et al. 2019) or GPT-3
// (Brown et al. 2020) over tokens, with `smp::submodule` where torch::nn would
// have a plain holder.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, V = vocabulary.

#include "runtime/intercept/submodule.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/train/models/language_head.hpp"
#include "runtime/train/models/model_sizes.hpp"

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <optional>

namespace smp {

/// Standard deviation of initial weights (GPT-2).
constexpr double gpt_weight_std = 0.02;

/// The same for layers whose output is added to the residual stream: smaller,
/// so that the stream's variance does not grow with depth (GPT-2).
double gpt_residual_std(const model_sizes& x);

/// Causal self-attention.
struct gpt_attention_impl : torch::nn::Module {
  /// @param index of the block
  gpt_attention_impl(const model_sizes& x, int64_t index);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  int64_t heads;
  double dropout;
  int64_t window;           // 0: none
  submodule<conv1d> c_attn; // C -> 3 C: query, key, value
  submodule<conv1d> c_proj;
  submodule<torch::nn::Dropout> resid_dropout;
};
TORCH_MODULE_IMPL(gpt_attention, gpt_attention_impl);

/// The feed-forward half of a block.
struct gpt_mlp_impl : torch::nn::Module {
  explicit gpt_mlp_impl(const model_sizes& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<conv1d> c_fc = nullptr;
  submodule<torch::nn::GELU> act;
  submodule<conv1d> c_proj = nullptr;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(gpt_mlp, gpt_mlp_impl);

/// One layer: attention, then feed-forward, each with a layer norm in front and
/// a residual connection.
struct gpt_block_impl : torch::nn::Module {
  gpt_block_impl(const model_sizes& x, int64_t index);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::LayerNorm> ln_1;
  submodule<gpt_attention> attn;
  submodule<torch::nn::LayerNorm> ln_2;
  submodule<gpt_mlp> mlp;
};
TORCH_MODULE_IMPL(gpt_block, gpt_block_impl);

/// Everything but the last layer.
template <class Block>
struct gpt_body : torch::nn::Module {
  explicit gpt_body(const model_sizes& x)
    : wte(x.vocabulary, x.width),
      wpe(x.sequence_length, x.width),
      drop(x.dropout),
      ln_f(norm_options(x)) {
    register_module("wte", wte);
    register_module("wpe", wpe);
    register_module("drop", drop);
    for (int64_t i = 0; i < x.layers; ++i)
      h->push_back(Block(x, i));
    register_module("h", h);
    register_module("ln_f", ln_f);
    torch::nn::init::normal_(wte->weight, 0, gpt_weight_std);
    torch::nn::init::normal_(wpe->weight, 0, gpt_weight_std);
  }

  /// tokens: [B, T] int64, T <= sequence_length @returns [B, T, C]
  torch::Tensor embedded(const torch::Tensor& tokens) {
    auto positions = torch::arange(tokens.size(1), tokens.options());
    return drop(wte(tokens) + wpe(positions));
  }

  submodule<torch::nn::Embedding> wte; // tokens
  submodule<torch::nn::Embedding> wpe; // positions
  submodule<torch::nn::Dropout> drop;
  /// A Sequential, so that consecutive layers on one rank are one request.
  torch::nn::Sequential h;
  submodule<torch::nn::LayerNorm> ln_f;
};

struct gpt_transformer_impl : gpt_body<gpt_block> {
  using gpt_body::gpt_body;

  /// tokens: [B, T] int64, T <= sequence_length @returns [B, T, C]
  torch::Tensor forward(torch::Tensor tokens);
};
TORCH_MODULE_IMPL(gpt_transformer, gpt_transformer_impl);

/// The model. Parameters have the names and shapes of Hugging Face's
/// GPT2LMHeadModel ("transformer.h.0.attn.c_attn.weight", [C, 3 C], ...), so
/// its files can be loaded. Initialised as GPT-2 from the default generator:
/// seed it before.
struct gpt_impl : torch::nn::Module {
  /// @throws error (config), see `require_transformer`
  explicit gpt_impl(const model_sizes& x);

  /// tokens: [B, T] int64, 0 <= tokens < V, T <= sequence_length
  /// @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens);

  /// tokens, targets: [B, T] int64 @returns their mean cross entropy
  torch::Tensor loss(torch::Tensor tokens, torch::Tensor targets);

  submodule<gpt_transformer> transformer = nullptr;
  std::optional<language_head> lm_head;
};
TORCH_MODULE_IMPL(gpt, gpt_impl);

} // namespace smp
