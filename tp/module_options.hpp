#pragma once

// What `smp::tp_register` is told about a class that computes the same as a
// module of torch::nn but has other parameters, and as which module it is
// shared (paper, appendix "Registering distributed modules").

#include "tp/cross_entropy.hpp"
#include "tp/distributed_module.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// y = x W^T + b
struct linear_options {
  /// Names of parameters of the module, or of modules below it
  /// ("inner.weight").
  std::string weight = "weight";
  /// There may be none.
  std::string bias = "bias";
  /// The weight is [in, out], not [out, in].
  bool inputs_first = false;
};

/// A table [rows, channels].
struct embedding_options {
  std::string weight = "weight";
  std::optional<int64_t> padding_idx = {};
  /// Rows that are looked up are first scaled down to this norm.
  std::optional<double> max_norm = {};
  double norm_type = 2;
  /// The gradient of a row is divided by how often a call looks it up.
  bool scale_grad_by_freq = false;
  /// Whether its gradients are sparse.
  bool sparse = false;
};

struct layer_norm_options {
  std::string weight = "weight";
  std::string bias = "bias";
  std::vector<int64_t> normalized_shape;
  double eps = 1e-5;
};

/// The last layer of a language model, and its loss.
struct lm_head_options {
  std::string weight = "weight"; // [words, channels]
  /// [words]; there may be none.
  std::string bias = "bias";
  cross_entropy_options loss;
};

/// @returns a module that has these options, without its parameters
native_module described(const linear_options& x);
native_module described(const embedding_options& x);
native_module described(const layer_norm_options& x);
native_module described(const transformer_layer_options& x);
native_module described(const attention_layer_options& x);
native_module described(const transformer_output_layer_options& x);
native_module described(const lm_head_options& x);

} // namespace smp
