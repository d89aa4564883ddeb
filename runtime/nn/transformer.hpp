#pragma once

// Transformers with the arguments of the paper (appendix "smp.nn module"). In
// one process they are ordinary modules. Tensor-parallel ranks automatically
// share each of their layers as a whole (docs/shared_modules.md).
//
// Shapes: B samples, T tokens, S tokens that are attended to, C = hidden_size,
// V = vocab_size.

#include "runtime/intercept/submodule.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/nn/distributed.hpp"
#include "runtime/nn/lm_head.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::nn {

/// Names and defaults are the paper's.
struct transformer_layer_arguments {
  int64_t num_attention_heads = 32;
  int64_t attention_head_size = 32;
  int64_t hidden_size = 1024;
  int64_t intermediate_size = 4096;
  double attention_dropout_prob = 0.1; // of the weights of attention
  double hidden_dropout_prob = 0.1;    // of what each half adds
  /// "gelu", "gelu_new" (its approximation by tanh), "relu" or "silu".
  std::string activation = "gelu";
  double layernorm_epsilon = 1e-5;
  /// With `use_normal_initialization`, the standard deviation of initial
  /// weights; biases start at 0. Without it, linears start as in torch::nn.
  double initializer_range = 0.02;
  bool use_normal_initialization = false;
  /// If set, a token sees no later one, and there are at most this many.
  std::optional<int64_t> causal_mask_size = {};
  /// Adds a third part, which attends to another model's output.
  bool add_cross_attention = false;
  /// Norms of each part: before it, n in h + f(n(h)), and after it, over the
  /// whole sum; one, both or none.
  bool pre_layernorm = false;
  bool post_layernorm = true;
  /// Factor of scores; nothing: 1 / sqrt(attention_head_size).
  std::optional<double> attention_scale = {};
};

struct transformer_arguments : transformer_layer_arguments {
  int64_t num_layers = 12;
};

struct transformer_lm_head_arguments : transformer_arguments {
  int64_t vocab_size = 30522;
  /// Longest sequence.
  int64_t num_positions = 1024;
  /// 0: there are none.
  int64_t num_token_types = 0;
  bool add_lm_head = true;
};

/// @throws error (config) naming the first argument that makes no sense
void validate(const transformer_layer_arguments& x);
void validate(const transformer_arguments& x);
void validate(const transformer_lm_head_arguments& x);

/// What layers pass on: hidden states [B, T, C]; optionally a mask, broadcast
/// to [B, heads, T, T], that is added to scores or, if it is bool, selects what
/// is seen. With cross-attention all four: a mask, the context that is attended
/// to, [B, S, C], and the context's mask, broadcast to [B, heads, T, S].
using layer_states = std::vector<torch::Tensor>;

/// Self-attention, or attention to another model's output, with its norm and a
/// residual connection.
struct distributed_attention_layer_impl : torch::nn::Module, shared_by_itself {
  /// @param cross it attends to another model's output
  explicit distributed_attention_layer_impl(
    const transformer_layer_arguments& x, bool cross = false);

  /// hidden: [B, T, C]; context: [B, S, C], unused by self-attention; mask: as
  /// in `layer_states`, or undefined
  /// @returns [B, T, C]
  /// @throws error (user_code) in self-attention for more tokens than
  /// `causal_mask_size`
  torch::Tensor forward(torch::Tensor hidden, torch::Tensor context,
                        torch::Tensor mask);

  transformer_layer_arguments arguments;
  bool cross;
  /// The only norm, or the one before; null: there is none.
  submodule<torch::nn::LayerNorm> layernorm = nullptr;
  /// The norm after, if there are both.
  submodule<torch::nn::LayerNorm> post_layernorm = nullptr;
  submodule<torch::nn::Linear> query, key, value; // C -> heads * head size
  submodule<torch::nn::Linear> dense;             // and back
  submodule<torch::nn::Dropout> dropout;
};

/// Its holder. For `tp_register`: how ranks share a class that computes what
/// `attention_layer_options` describes.
struct distributed_attention_layer
  : torch::nn::ModuleHolder<distributed_attention_layer_impl> {
  using ModuleHolder::ModuleHolder;
  using options = attention_layer_options;
  static constexpr size_t arguments = 0;
};

/// The feed-forward half, with its norm and a residual connection.
struct distributed_transformer_output_layer_impl : torch::nn::Module,
                                                   shared_by_itself {
  explicit distributed_transformer_output_layer_impl(
    const transformer_layer_arguments& x);

  /// x: [B, T, C] @returns the same
  torch::Tensor forward(torch::Tensor x);

  transformer_layer_arguments arguments;
  /// As in attention.
  submodule<torch::nn::LayerNorm> layernorm = nullptr;
  submodule<torch::nn::LayerNorm> post_layernorm = nullptr;
  submodule<torch::nn::Linear> dense1; // C -> intermediate_size
  submodule<torch::nn::Linear> dense2; // and back
  submodule<torch::nn::Dropout> dropout;
};

/// Likewise, for `transformer_output_layer_options`.
struct distributed_transformer_output_layer
  : torch::nn::ModuleHolder<distributed_transformer_output_layer_impl> {
  using ModuleHolder::ModuleHolder;
  using options = transformer_output_layer_options;
  static constexpr size_t arguments = 1;
};

/// One layer. For a Sequential of them, or as `smp::submodule`.
struct distributed_transformer_layer_impl : torch::nn::Module,
                                            shared_by_itself {
  /// @throws error (config), see `validate`
  explicit distributed_transformer_layer_impl(
    const transformer_layer_arguments& x);

  /// @returns its arguments, with new hidden states
  /// @throws error (user_code) for more tokens than `causal_mask_size`
  layer_states forward(layer_states x);

  transformer_layer_arguments arguments;
  submodule<distributed_attention_layer> attention;
  submodule<distributed_attention_layer> crossattention = nullptr;
  submodule<distributed_transformer_output_layer> output;
};

/// Its holder. For `tp_register`: how ranks share a class that computes what
/// `transformer_layer_options` describes.
struct distributed_transformer_layer
  : torch::nn::ModuleHolder<distributed_transformer_layer_impl> {
  using ModuleHolder::ModuleHolder;
  using options = transformer_layer_options;
  static constexpr size_t arguments = 0;
};

/// A sequence of layers.
struct distributed_transformer_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit distributed_transformer_impl(const transformer_arguments& x);

  /// @returns its arguments, with new hidden states
  /// @throws error (user_code) for more tokens than `causal_mask_size`
  layer_states forward(layer_states x);

  transformer_arguments arguments;
  torch::nn::Sequential seq_layers;
};
TORCH_MODULE_IMPL(distributed_transformer, distributed_transformer_impl);

/// A language model: sums of embeddings, the layers, with `pre_layernorm` a
/// norm, and scores of all words by the embedding's weight. With
/// `pre_layernorm`, `causal_mask_size` and "gelu_new" it is GPT-2.
struct distributed_transformer_lm_head_impl : torch::nn::Module {
  /// @throws error (config), see `validate`
  explicit distributed_transformer_lm_head_impl(
    const transformer_lm_head_arguments& x);

  /// tokens: [B, T] int64, 0 <= tokens < V, T <= num_positions
  /// @param attention_mask [B, T], 1 for tokens and 0 for padding; undefined:
  /// there is no padding
  /// @param token_type_ids [B, T] int64; undefined: all are 0
  /// @param context with cross-attention, the attended states: [B, S, C]
  /// @param context_mask [B, S] as `attention_mask`, or undefined
  /// @returns scores [B, T, V], or without `add_lm_head` hidden states [B, T,
  /// C]
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor attention_mask = {},
                        torch::Tensor token_type_ids = {},
                        torch::Tensor context = {},
                        torch::Tensor context_mask = {});

  /// The same, followed by the loss against `labels`: where ranks share the
  /// model, none of them has all scores.
  /// @param labels [B, T] int64, or -100 for tokens that do not count
  /// @returns the mean cross entropy, a scalar
  /// @throws error (unsupported) without `add_lm_head`
  torch::Tensor loss(torch::Tensor tokens, torch::Tensor labels,
                     torch::Tensor attention_mask = {},
                     torch::Tensor token_type_ids = {},
                     torch::Tensor context = {},
                     torch::Tensor context_mask = {});

  transformer_lm_head_arguments arguments;
  distributed_embedding word_embedding;
  submodule<torch::nn::Embedding> position_embedding;
  submodule<torch::nn::Embedding> token_type_embedding = nullptr;
  submodule<torch::nn::Dropout> dropout;
  submodule<distributed_transformer> transformer;
  submodule<torch::nn::LayerNorm> layernorm = nullptr;
  distributed_lm_head lm_head = nullptr; // with the embedding's weight

private:
  torch::Tensor run(torch::Tensor tokens, torch::Tensor attention_mask,
                    torch::Tensor token_type_ids, torch::Tensor context,
                    torch::Tensor context_mask);
};
TORCH_MODULE_IMPL(distributed_transformer_lm_head,
                  distributed_transformer_lm_head_impl);

} // namespace smp::nn
