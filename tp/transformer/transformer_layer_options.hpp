#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// What an ordinary transformer layer computes, and where its parts stand below
/// it (paper, appendix on the smp.nn module). One of its halves may be missing,
/// or both if there is cross-attention: the names of its linears are then
/// empty.
struct transformer_layer_options {
  int64_t num_attention_heads = 1;
  /// Which norms each half has: one before, n in h + f(n(h)), and one behind,
  /// of the whole sum; one, both or none.
  bool pre_layernorm = true;
  bool post_layernorm = false;
  /// The factor of scores; nothing: 1 / sqrt(width of a head).
  std::optional<double> scale = {};
  /// A token sees no later one.
  bool causal = false;
  /// The most tokens of a sequence; 0: any number.
  int64_t causal_mask_size = 0;
  /// A token sees only the last so many, itself included; 0: all.
  int64_t window = 0;
  /// An argument, if it is passed, is a mask: added to the scores, or if bool,
  /// true where visible; it broadcasts to [B, heads, tokens, tokens].
  bool takes_mask = false;
  /// Its position in the arguments.
  size_t mask_position = 1;
  /// The result consists of all tensors of the arguments, with the new hidden
  /// states, and with `positions` the new mask, in their places.
  bool returns_arguments = false;
  /// Norms scale to a mean square of 1, and have no bias.
  bool rms_norm = false;
  /// Elementwise, between both linears of the output half.
  std::function<at::Tensor(const at::Tensor&)> activation = {};
  /// Whether dropout is active; undefined: always.
  std::function<bool()> training = {};

  // -- where ------------------------------------------------------------------

  struct norm_place {
    std::string name; // "ln_1"
    double eps = 1e-5;
  };

  struct linear_place {
    std::string name; // "attn.c_proj"
    /// The weight is [in, out], as of a Conv1D.
    bool inputs_first = false;
  };

  struct dropout_place {
    std::string name = {}; // of the module that draws; empty: the layer
    double p = 0;
  };

  /// Attention over the result of another part of the model.
  struct attention_place {
    norm_place norm;
    linear_place query, key, value, output;
    dropout_place dropout, output_dropout;
    norm_place post_norm = {}; // where there are both
  };

  /// A table [any, heads] of biases by position, which are added to the mask;
  /// needs `takes_mask`.
  struct position_place {
    std::string name; // of an Embedding
    /// Of some heads: [any, h] -> [1, h, tokens, tokens].
    std::function<at::Tensor(const at::Tensor& table, int64_t tokens)> bias;
  };

  norm_place attention_norm;
  norm_place output_norm;
  /// The norms behind, where there are both.
  norm_place attention_post_norm = {};
  norm_place output_post_norm = {};
  /// One for query, key and value in this order, or one for each.
  std::vector<linear_place> query_key_value;
  linear_place attention_output;
  linear_place intermediate;
  /// The result of the activation is multiplied with this linear's result for
  /// the same input; without a name: there is none.
  linear_place gate;
  linear_place output;
  dropout_place attention_dropout;        // of the weights of attention
  dropout_place attention_output_dropout; // behind `attention_output`
  dropout_place inner_dropout;            // before `output`
  dropout_place output_dropout;           // behind `output`
  /// A third part between both halves: attention to an argument, [B, any,
  /// channels], with another one as its mask, if that is passed.
  std::optional<attention_place> cross_attention = {};
  size_t context_position = 2;
  size_t context_mask_position = 3;
  std::optional<position_place> positions = {};
  /// Modules below the layer that only contain others: callers call those
  /// directly. Filled in by the code that reads the model.
  std::set<std::string> containers = {};

  /// Self-attention.
  bool has_attention() const {
    return !attention_output.name.empty() || !query_key_value.empty();
  }

  bool has_output() const {
    return !intermediate.name.empty() || !output.name.empty();
  }
};

/// The attention of a layer as a module of its own, with its norm and its
/// residual sum; the rest is as in `transformer_layer_options`.
struct attention_layer_options {
  int64_t num_attention_heads = 1;
  bool pre_layernorm = true;
  bool post_layernorm = false;
  std::optional<double> scale = {};
  bool causal = false;
  int64_t causal_mask_size = 0;
  int64_t window = 0;
  bool rms_norm = false;
  std::function<bool()> training = {};
  /// Positions in the arguments, of which the first one is the hidden states:
  /// of the tensor to attend to, or 0 for self-attention; and of a mask, which
  /// may be missing, or 0 if it takes none.
  size_t context = 0;
  size_t mask = 0;
  transformer_layer_options::norm_place norm;
  transformer_layer_options::norm_place post_norm = {};
  /// One for each of query, key and value; for self-attention also one for all.
  std::vector<transformer_layer_options::linear_place> query_key_value;
  transformer_layer_options::linear_place output;
  /// Of the weights of attention; without a name, the module itself draws.
  transformer_layer_options::dropout_place dropout;
  transformer_layer_options::dropout_place output_dropout;
};

/// The feed-forward half as a module of its own, likewise.
struct transformer_output_layer_options {
  bool pre_layernorm = true;
  bool post_layernorm = false;
  bool rms_norm = false;
  std::function<at::Tensor(const at::Tensor&)> activation = {};
  std::function<bool()> training = {};
  transformer_layer_options::norm_place norm;
  transformer_layer_options::norm_place post_norm = {};
  transformer_layer_options::linear_place intermediate;
  transformer_layer_options::linear_place gate;
  transformer_layer_options::linear_place output;
  transformer_layer_options::dropout_place inner_dropout;
  transformer_layer_options::dropout_place output_dropout;
};

} // namespace smp
