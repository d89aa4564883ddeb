#pragma once

// BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019), which differ in how
// they count positions, in their padding token and in what their heads are
// called; both as masked language models.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, V = vocabulary.

#include "runtime/intercept/submodule.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/train/models/language_head.hpp"
#include "runtime/train/models/model_sizes.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace smp {

/// Tokens, positions and segments, added and normalised.
struct bert_embeddings_impl : torch::nn::Module {
  bert_embeddings_impl(const model_sizes& x, bool is_roberta);

  /// tokens, segments: [B, T] int64 @returns [B, T, C]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor segments);

  /// Positions count from padding + 1 and stand still at padding.
  bool is_roberta;
  int64_t padding; // token whose embedding is never trained
  submodule<torch::nn::Embedding> word_embeddings;
  submodule<torch::nn::Embedding> position_embeddings;
  submodule<torch::nn::Embedding> token_type_embeddings;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(bert_embeddings, bert_embeddings_impl);

/// Self-attention without the projection and the norm that follow it.
struct bert_self_attention_impl : torch::nn::Module {
  explicit bert_self_attention_impl(const model_sizes& x);

  /// x: [B, T, C], bias: see `attend` @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor bias);

  int64_t heads;
  double dropout;
  submodule<torch::nn::Linear> query;
  submodule<torch::nn::Linear> key;
  submodule<torch::nn::Linear> value;
};
TORCH_MODULE_IMPL(bert_self_attention, bert_self_attention_impl);

/// Ends each half of a layer: projects, adds the input of the half (the
/// residual), normalises.
struct bert_output_impl : torch::nn::Module {
  bert_output_impl(const model_sizes& x, int64_t inner);

  /// x: [B, T, inner], residual: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor residual);

  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(bert_output, bert_output_impl);

struct bert_attention_impl : torch::nn::Module {
  explicit bert_attention_impl(const model_sizes& x);

  /// x: [B, T, C], bias: see `attend` @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor bias);

  submodule<bert_self_attention> attention; // "self"
  submodule<bert_output> output;
};
TORCH_MODULE_IMPL(bert_attention, bert_attention_impl);

/// Widens for the feed-forward half.
struct bert_intermediate_impl : torch::nn::Module {
  explicit bert_intermediate_impl(const model_sizes& x);

  /// x: [B, T, C] @returns [B, T, feed_forward]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> dense;
};
TORCH_MODULE_IMPL(bert_intermediate, bert_intermediate_impl);

struct bert_layer_impl : torch::nn::Module {
  explicit bert_layer_impl(const model_sizes& x);

  /// @param x [B, T, C], and a bias for `attend`
  /// @returns [B, T, C] and the same bias, as a Sequential of layers needs it
  std::tuple<torch::Tensor, torch::Tensor>
  forward(std::tuple<torch::Tensor, torch::Tensor> x);

  submodule<bert_attention> attention;
  submodule<bert_intermediate> intermediate;
  submodule<bert_output> output;
};
TORCH_MODULE_IMPL(bert_layer, bert_layer_impl);

struct bert_encoder_impl : torch::nn::Module {
  explicit bert_encoder_impl(const model_sizes& x);

  /// x: [B, T, C], bias: see `attend` @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor bias);

  /// A Sequential, so that consecutive layers on one rank are one request.
  torch::nn::Sequential layer;
};
TORCH_MODULE_IMPL(bert_encoder, bert_encoder_impl);

/// Everything but the head.
struct bert_body_impl : torch::nn::Module {
  bert_body_impl(const model_sizes& x, bool is_roberta);

  /// tokens, segments: [B, T] int64; mask: [B, T], 0 at padding
  /// @returns [B, T, C]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor mask,
                        torch::Tensor segments);

  submodule<bert_embeddings> embeddings;
  submodule<bert_encoder> encoder;
};
TORCH_MODULE_IMPL(bert_body, bert_body_impl);

/// BERT's layer before the last.
struct bert_transform_impl : torch::nn::Module {
  explicit bert_transform_impl(const model_sizes& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
};
TORCH_MODULE_IMPL(bert_transform, bert_transform_impl);

struct bert_predictions_impl : torch::nn::Module {
  /// word_embeddings: [V, C]
  bert_predictions_impl(const model_sizes& x, torch::Tensor word_embeddings);

  /// x: [B, T, C], labels: [B, T] int64
  /// @returns the mean cross entropy over the labels that are not -100; without
  /// labels, logits [B, T, V]
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels);

  torch::Tensor bias; // [V], also the decoder's
  submodule<bert_transform> transform;
  std::optional<language_head> decoder;
};
TORCH_MODULE_IMPL(bert_predictions, bert_predictions_impl);

struct bert_head_impl : torch::nn::Module {
  bert_head_impl(const model_sizes& x, torch::Tensor word_embeddings);

  /// As in `bert_predictions_impl`.
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels);

  submodule<bert_predictions> predictions;
};
TORCH_MODULE_IMPL(bert_head, bert_head_impl);

struct roberta_head_impl : torch::nn::Module {
  /// word_embeddings: [V, C]
  roberta_head_impl(const model_sizes& x, torch::Tensor word_embeddings);

  /// As in `bert_predictions_impl`.
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels);

  torch::Tensor bias; // [V], also the decoder's
  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> layer_norm;
  std::optional<language_head> decoder;
};
TORCH_MODULE_IMPL(roberta_head, roberta_head_impl);

/// A body, and a head that predicts its masked tokens.
template <class Head>
struct masked_model_impl : torch::nn::Module {
  /// @throws error (config) naming the first size that makes no sense
  masked_model_impl(const model_sizes& x, bool is_roberta, const char* body,
                    const char* head);

  /// tokens: [B, T] int64, T <= sequence_length
  /// @param mask [B, T], 0 at padding; undefined: no padding
  /// @param segments [B, T] int64; undefined: all 0
  /// @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor mask = {},
                        torch::Tensor segments = {});

  /// labels: [B, T] int64; the others as above
  /// @returns the mean cross entropy over the labels that are not -100
  torch::Tensor loss(torch::Tensor tokens, torch::Tensor labels,
                     torch::Tensor mask = {}, torch::Tensor segments = {});

  bool loss_in_head;
  submodule<bert_body> body = nullptr;
  submodule<Head> head = nullptr;

private:
  torch::Tensor run_body(const torch::Tensor& tokens, torch::Tensor mask,
                         torch::Tensor segments);
};

/// Parameters have the names and shapes of Hugging Face's BertForMaskedLM, so
/// its files can be loaded. Initialised as BERT from the default generator.
struct bert_impl : masked_model_impl<bert_head> {
  explicit bert_impl(const model_sizes& x)
    : masked_model_impl(x, false, "bert", "cls") {
    // nop
  }
};
TORCH_MODULE_IMPL(bert, bert_impl);

/// The same as RobertaForMaskedLM.
struct roberta_impl : masked_model_impl<roberta_head> {
  explicit roberta_impl(const model_sizes& x)
    : masked_model_impl(x, true, "roberta", "lm_head") {
    // nop
  }
};
TORCH_MODULE_IMPL(roberta, roberta_impl);

} // namespace smp
