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
/// it (paper, appendix on the smp.nn module). One of its halves may not be
/// there, or both if there is attention to something else: what then would name
/// its linears names none.
struct transformer_layer_options {
  int64_t num_attention_heads = 1;
  /// Which norms each half has: before, of n(h) in h + f(n(h)), and behind, of
  /// the whole sum; one, both or none.
  bool pre_layernorm = true;
  bool post_layernorm = false;
  /// Of the scores; nothing: 1 / sqrt(width of a head).
  std::optional<double> scale = {};
  /// A token sees no later one.
  bool causal = false;
  /// There are at most so many tokens; 0: any number.
  int64_t causal_mask_size = 0;
  /// Of those before it only the last so many, itself included; 0: all.
  int64_t window = 0;
  /// A tensor of the arguments, if it is there, is added to the scores, or if
  /// it is bool says what is seen: broadcast to [B, heads, tokens, tokens].
  bool takes_mask = false;
  /// Which one.
  size_t mask_position = 1;
  /// The result is all tensors of the arguments, with the hidden states, and
  /// with `positions` the mask, in their places.
  bool returns_arguments = false;
  /// Norms scale to a mean square of 1, and have no bias.
  bool rms_norm = false;
  /// Between both linears of the output half, number by number.
  std::function<at::Tensor(const at::Tensor&)> activation = {};
  /// Whether dropout drops; undefined: always.
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

  /// Attention over what another part of the model made.
  struct attention_place {
    norm_place norm;
    linear_place query, key, value, output;
    dropout_place dropout, output_dropout;
    norm_place post_norm = {}; // where there are both
  };

  /// A table [any, heads] that says what is added to the mask by position;
  /// needs `takes_mask`.
  struct position_place {
    std::string name; // of an Embedding
    /// Of some heads: [any, h] -> [1, h, tokens, tokens].
    std::function<at::Tensor(const at::Tensor& table, int64_t tokens)> bias;
  };

  norm_place attention_norm;
  norm_place output_norm;
  /// Those behind, where there are both.
  norm_place attention_post_norm = {};
  norm_place output_post_norm = {};
  /// One for query, key and value in this order, or one for each.
  std::vector<linear_place> query_key_value;
  linear_place attention_output;
  linear_place intermediate;
  /// What comes out of the activation is multiplied with what this makes of the
  /// same; without a name: there is none.
  linear_place gate;
  linear_place output;
  dropout_place attention_dropout;        // of the weights of attention
  dropout_place attention_output_dropout; // behind `attention_output`
  dropout_place inner_dropout;            // before `output`
  dropout_place output_dropout;           // behind `output`
  /// A third part between both, of a tensor of the arguments, [B, any,
  /// channels], with another one as its mask, if that is there.
  std::optional<attention_place> cross_attention = {};
  size_t context_position = 2;
  size_t context_mask_position = 3;
  std::optional<position_place> positions = {};
  /// Modules below the layer that only hold others: whoever calls these calls
  /// them past it. Found by who reads the model.
  std::set<std::string> containers = {};

  /// To itself.
  bool has_attention() const {
    return !attention_output.name.empty() || !query_key_value.empty();
  }

  bool has_output() const {
    return !intermediate.name.empty() || !output.name.empty();
  }
};

/// The attention of a layer as a module of its own, with its norm, added to
/// what went in; the rest is as in `transformer_layer_options`.
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
  /// of what it attends to, or 0 if that is these; and of a mask, which may be
  /// missing, or 0 if it takes none.
  size_t context = 0;
  size_t mask = 0;
  transformer_layer_options::norm_place norm;
  transformer_layer_options::norm_place post_norm = {};
  /// One for each of query, key and value; of itself also one for all.
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
