#pragma once

// Modules of torch::nn that tensor-parallel ranks share automatically (paper,
// appendix "smp.nn module"). In one process they are the modules of
// torch::nn.

#include "runtime/intercept/submodule.hpp"
#include "tp/module_options.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

namespace smp::nn {

/// A submodule of class H that ranks share if they can; if not, the partition
/// print says why.
template <class H>
class distributed : public submodule<H> {
public:
  /// @param xs as for an H
  template <class... Ts>
  requires std::is_constructible_v<submodule<H>, Ts...>
  explicit(sizeof...(Ts) == 1) distributed(Ts&&... xs)
    : submodule<H>(std::forward<Ts>(xs)...) {
    auto& mark = this->get()->smp_hook.sharing;
    mark = sharing_mark{true, mark ? mark->saves_memory : std::nullopt};
  }

  distributed(std::nullptr_t) : submodule<H>(nullptr) {
    // nop
  }
};

// For `tp_register`, each also names the options of its distribution and, as
// `arguments`, the number of tensors that it takes; 0: it may take several.

/// [B, ..., in] -> [B, ..., out]
struct distributed_linear : distributed<torch::nn::Linear> {
  using distributed::distributed;
  using options = linear_options;
  static constexpr size_t arguments = 1;
};

/// Names and defaults are the paper's.
struct embedding_arguments {
  int64_t num_embeddings = 0;
  int64_t embedding_dim = 0;
  std::optional<int64_t> padding_idx = {};
  std::optional<double> max_norm = {};
  double norm_type = 2;
  bool scale_grad_by_freq = false;
  bool sparse = false;
  /// Standard deviation of the initial table; its row `padding_idx` is 0.
  double initializer_range = 0.02;
};

/// indices [B, ...] -> [B, ..., channels]
struct distributed_embedding : distributed<torch::nn::Embedding> {
  using distributed::distributed;
  /// By value, or the constructor above would match better.
  /// @throws error (config) naming an argument that makes no sense
  explicit distributed_embedding(embedding_arguments x);
  using options = embedding_options;
  static constexpr size_t arguments = 1;
};

/// [B, ..., n1, ..., nk] -> the same
struct distributed_layer_norm : distributed<torch::nn::LayerNorm> {
  using distributed::distributed;
  using options = layer_norm_options;
  static constexpr size_t arguments = 1;
};

} // namespace smp::nn
