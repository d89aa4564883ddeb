#pragma once

// T5 (Raffel et al. 2020): an encoder and a decoder whose attention encodes
// positions as a bias that the first block of each computes and its other
// blocks share.
//
// Shapes: B sequences per (micro)batch, S tokens in, T tokens out, C = width,
// H heads, V = vocabulary.

#include "runtime/intercept/submodule.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/train/models/language_head.hpp"
#include "runtime/train/models/model_sizes.hpp"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <optional>
#include <tuple>
#include <vector>

namespace smp {

/// What the blocks of a stack pass on: {x, bias}, in a decoder {x, bias,
/// context, context bias}, with x: [B, T, C], bias: [B or 1, H or 1, T, T],
/// context: the encoder's result [B, S, C], context bias: [B, 1, 1, S].
using t5_states = std::vector<torch::Tensor>;

struct t5_attention_impl : torch::nn::Module {
  /// @param positions has the table of biases by distance
  /// @param decoder attends to earlier tokens only
  t5_attention_impl(const model_sizes& x, bool positions, bool decoder);

  /// x: [B, T, C], context: [B, S, C] (x itself: self-attention), bias: see
  /// `attend`
  /// @returns [B, T, C], and the bias plus that of positions
  std::tuple<torch::Tensor, torch::Tensor>
  forward(torch::Tensor x, torch::Tensor context, torch::Tensor bias);

  model_sizes sizes;
  bool decoder;
  submodule<torch::nn::Linear> q = nullptr; // C -> H * head_size
  submodule<torch::nn::Linear> k = nullptr;
  submodule<torch::nn::Linear> v = nullptr;
  submodule<torch::nn::Linear> o = nullptr; // H * head_size -> C
  submodule<torch::nn::Embedding> relative_attention_bias = nullptr;
};
TORCH_MODULE_IMPL(t5_attention, t5_attention_impl);

/// The parts of a block: each normalises its input and adds its result to that
/// input.
struct t5_self_attention_impl : torch::nn::Module {
  t5_self_attention_impl(const model_sizes& x, bool positions, bool decoder);

  /// @returns x and bias for the next block
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x,
                                                   torch::Tensor bias);

  submodule<t5_attention> attention; // "SelfAttention"
  submodule<rms_norm> layer_norm;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(t5_self_attention, t5_self_attention_impl);

struct t5_cross_attention_impl : torch::nn::Module {
  explicit t5_cross_attention_impl(const model_sizes& x);

  /// @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor context,
                        torch::Tensor bias);

  submodule<t5_attention> attention; // "EncDecAttention"
  submodule<rms_norm> layer_norm;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(t5_cross_attention, t5_cross_attention_impl);

struct t5_dense_impl : torch::nn::Module {
  explicit t5_dense_impl(const model_sizes& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  bool gated;
  submodule<torch::nn::Linear> wi = nullptr;   // "wi", gated: "wi_0"
  submodule<torch::nn::Linear> wi_1 = nullptr; // gated only
  submodule<torch::nn::Linear> wo = nullptr;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(t5_dense, t5_dense_impl);

struct t5_feed_forward_impl : torch::nn::Module {
  explicit t5_feed_forward_impl(const model_sizes& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<t5_dense> dense; // "DenseReluDense"
  submodule<rms_norm> layer_norm;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(t5_feed_forward, t5_feed_forward_impl);

struct t5_block_impl : torch::nn::Module {
  t5_block_impl(const model_sizes& x, bool positions, bool decoder);

  t5_states forward(t5_states x);

  torch::nn::ModuleList layer; // the parts below, in this order
  submodule<t5_self_attention> self_attention;
  submodule<t5_cross_attention> cross_attention = nullptr; // decoder only
  submodule<t5_feed_forward> feed_forward;
};
TORCH_MODULE_IMPL(t5_block, t5_block_impl);

/// The encoder or the decoder.
struct t5_stack_impl : torch::nn::Module {
  t5_stack_impl(const model_sizes& x, submodule<torch::nn::Embedding> shared,
                bool decoder);

  /// @param x as `t5_states`, but with tokens [B, T] int64 as its first element
  /// @returns [B, T, C]
  torch::Tensor forward(t5_states x);

  submodule<torch::nn::Embedding> embed_tokens;
  /// A Sequential, so that consecutive blocks on one rank are one request.
  torch::nn::Sequential block;
  submodule<rms_norm> final_layer_norm;
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(t5_stack, t5_stack_impl);

/// Parameters have the names and shapes of Hugging Face's
/// T5ForConditionalGeneration, so its files can be loaded. Initialised as T5
/// from the default generator.
struct t5_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  explicit t5_impl(const model_sizes& x);

  /// tokens: [B, S] int64, decoder_tokens: [B, T] int64
  /// @param mask [B, S], 0 at padding; undefined: no padding
  /// @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor decoder_tokens,
                        torch::Tensor mask = {});

  /// As `forward`. labels: [B, T] int64
  /// @returns the mean cross entropy over the labels that are not -100
  torch::Tensor loss(torch::Tensor tokens, torch::Tensor decoder_tokens,
                     torch::Tensor mask, torch::Tensor labels);

  /// The input of `lm_head`. @returns [B, T, C]
  torch::Tensor hidden(const torch::Tensor& tokens,
                       const torch::Tensor& decoder_tokens,
                       const torch::Tensor& mask);

  bool tied;
  submodule<torch::nn::Embedding> shared;
  submodule<t5_stack> encoder = nullptr;
  submodule<t5_stack> decoder = nullptr;
  std::optional<language_head> lm_head;
};
TORCH_MODULE_IMPL(t5, t5_impl);

/// The decoder's input when it predicts `labels`: the labels shifted right by
/// one place, with token 0 in front and 0 instead of -100.
/// labels: [B, T] int64 @returns [B, T] int64
torch::Tensor t5_decoder_tokens(const torch::Tensor& labels);

} // namespace smp
