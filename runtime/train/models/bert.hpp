#pragma once

// BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019), which differ in how
// they count positions, in their padding token and in what their heads are
// called; both as masked language models.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, V = vocabulary.

#include "runtime/intercept/submodule.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/train/models/language_head.hpp"

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

/// Sizes of a `bert` or a `roberta`.
struct bert_config {
  int64_t vocabulary = 256;
  /// Longest sequence. The table of positions of a RoBERTa has two rows more.
  int64_t sequence_length = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 256;
  /// Width inside the feed-forward half of a layer; 0: 4 times `width`.
  int64_t feed_forward = 0;
  /// Different segments ("token types").
  int64_t segments = 2;
  double norm_eps = 1e-12;
  double dropout = 0;
  /// The last layer uses the embedding's weight, as the originals do.
  bool tied = true;
  /// The last layer also computes the loss, so that tensor-parallel ranks can
  /// shard it by vocabulary.
  bool loss_in_head = false;
  /// Token whose embedding is never trained: 0 for BERT, 1 for RoBERTa.
  int64_t padding = 0;
  /// RoBERTa: positions count from `padding` + 1 and stand still at padding.
  bool positions_skip_padding = false;
};

/// @throws error (config) naming the first size that makes no sense
void validate(const bert_config& x);

/// Tokens, positions and segments, added and normalised.
struct bert_embeddings_impl : torch::nn::Module {
  explicit bert_embeddings_impl(const bert_config& x);

  /// tokens, segments: [B, T] int64 @returns [B, T, C]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor segments);

  int64_t padding;
  bool positions_skip_padding;
  submodule<torch::nn::Embedding> word_embeddings;
  submodule<torch::nn::Embedding> position_embeddings;
  submodule<torch::nn::Embedding> token_type_embeddings;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(bert_embeddings, bert_embeddings_impl);

/// Self-attention without the projection and the norm that follow it.
struct bert_self_attention_impl : torch::nn::Module {
  explicit bert_self_attention_impl(const bert_config& x);

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
  bert_output_impl(const bert_config& x, int64_t inner);

  /// x: [B, T, inner], residual: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor residual);

  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
  submodule<torch::nn::Dropout> dropout;
};
TORCH_MODULE_IMPL(bert_output, bert_output_impl);

struct bert_attention_impl : torch::nn::Module {
  explicit bert_attention_impl(const bert_config& x);

  /// x: [B, T, C], bias: see `attend` @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor bias);

  submodule<bert_self_attention> attention; // "self"
  submodule<bert_output> output;
};
TORCH_MODULE_IMPL(bert_attention, bert_attention_impl);

/// Widens for the feed-forward half.
struct bert_intermediate_impl : torch::nn::Module {
  explicit bert_intermediate_impl(const bert_config& x);

  /// x: [B, T, C] @returns [B, T, feed_forward]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> dense;
};
TORCH_MODULE_IMPL(bert_intermediate, bert_intermediate_impl);

struct bert_layer_impl : torch::nn::Module {
  explicit bert_layer_impl(const bert_config& x);

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
  explicit bert_encoder_impl(const bert_config& x);

  /// x: [B, T, C], bias: see `attend` @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x, torch::Tensor bias);

  /// A Sequential, so that consecutive layers on one rank are one request.
  torch::nn::Sequential layer;
};
TORCH_MODULE_IMPL(bert_encoder, bert_encoder_impl);

/// Everything but the head.
struct bert_body_impl : torch::nn::Module {
  explicit bert_body_impl(const bert_config& x);

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
  explicit bert_transform_impl(const bert_config& x);

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x);

  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> norm; // "LayerNorm"
};
TORCH_MODULE_IMPL(bert_transform, bert_transform_impl);

struct bert_predictions_impl : torch::nn::Module {
  /// word_embeddings: [V, C]
  bert_predictions_impl(const bert_config& x, torch::Tensor word_embeddings);

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
  bert_head_impl(const bert_config& x, torch::Tensor word_embeddings);

  /// As in `bert_predictions_impl`.
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels);

  submodule<bert_predictions> predictions;
};
TORCH_MODULE_IMPL(bert_head, bert_head_impl);

/// Parameters have the names and shapes of Hugging Face's BertForMaskedLM, so
/// its files can be loaded. Initialised as BERT from the default generator.
struct bert_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit bert_impl(const bert_config& x);

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
  submodule<bert_body> bert = nullptr;
  submodule<bert_head> cls = nullptr;
};
TORCH_MODULE_IMPL(bert, bert_impl);

struct roberta_head_impl : torch::nn::Module {
  /// word_embeddings: [V, C]
  roberta_head_impl(const bert_config& x, torch::Tensor word_embeddings);

  /// As in `bert_predictions_impl`.
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels);

  torch::Tensor bias; // [V], also the decoder's
  submodule<torch::nn::Linear> dense;
  submodule<torch::nn::LayerNorm> layer_norm;
  std::optional<language_head> decoder;
};
TORCH_MODULE_IMPL(roberta_head, roberta_head_impl);

/// The same as RobertaForMaskedLM.
struct roberta_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit roberta_impl(bert_config x);

  /// As in `bert_impl`.
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor mask = {},
                        torch::Tensor segments = {});
  torch::Tensor loss(torch::Tensor tokens, torch::Tensor labels,
                     torch::Tensor mask = {}, torch::Tensor segments = {});

  bool loss_in_head;
  submodule<bert_body> roberta = nullptr;
  submodule<roberta_head> lm_head = nullptr;
};
TORCH_MODULE_IMPL(roberta, roberta_impl);

} // namespace smp
