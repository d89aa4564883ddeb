#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
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
  /// The second tensor of the arguments is added to the scores, or if it is
  /// bool says what is seen: broadcast to [B, heads, tokens, tokens].
  bool takes_mask = false;
  /// The result is a tuple of the hidden states and the mask.
  bool returns_mask = false;
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

  norm_place attention_norm;
  norm_place output_norm;
  /// One for query, key and value in this order, or one for each.
  std::vector<linear_place> query_key_value;
  linear_place attention_output;
  linear_place intermediate;
  linear_place output;
  dropout_place attention_dropout;        // of the weights of attention
  dropout_place attention_output_dropout; // behind `attention_output`
  dropout_place output_dropout;           // behind `output`
};

} // namespace smp
