#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// What an ordinary transformer layer computes, and where its parts stand below
/// it (paper, appendix on the smp.nn module).
struct transformer_layer_options {
  int64_t num_attention_heads = 1;
  /// Each half is h + f(norm(h)), or norm(h + f(h)).
  bool pre_layernorm = true;
  /// Of the scores; nothing: 1 / sqrt(width of a head).
  std::optional<double> scale = {};
  /// A token sees no later one.
  bool causal = false;
  /// Of those before it only the last so many, itself included; 0: all.
  int64_t window = 0;
  /// The second tensor of the arguments, if there is one, is added to the
  /// scores, or if it is bool says what is seen: broadcast to [B, heads,
  /// tokens, tokens].
  bool takes_mask = false;
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
    std::string name = {}; // of the module that draws
    double p = 0;
  };

  /// Attention over what another part of the model made.
  struct attention_place {
    norm_place norm;
    linear_place query, key, value, output;
    dropout_place dropout, output_dropout;
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
  /// A third part between both, of the third tensor of the arguments, [B, any,
  /// channels], with the fourth as its mask.
  std::optional<attention_place> cross_attention = {};
  std::optional<position_place> positions = {};
  /// Modules below the layer that only hold others: whoever calls these calls
  /// them past it. Found by who reads the model.
  std::set<std::string> containers = {};
};

} // namespace smp
