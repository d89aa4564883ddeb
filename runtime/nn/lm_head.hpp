#pragma once

#include "runtime/nn/distributed.hpp"
#include "tp/cross_entropy.hpp"
#include "tp/module_options.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

namespace smp::nn {

/// The last layer of a language model, with its loss. If tensor-parallel ranks
/// share it, each computes the logits of its part of the vocabulary only, for
/// one peer's samples at a time (paper, appendix on the smp.nn module). Logits
/// are then sent nowhere, not even to pp_rank 0. Used as
/// `smp::submodule<smp::nn::lm_head>`.
struct lm_head_impl : torch::nn::Module {
  /// @param weight [V, C]: a new one, or that of an Embedding
  /// @param bias [V], which parent modules may register, too, if they only give
  /// it a name; undefined: there is none
  explicit lm_head_impl(at::Tensor weight, cross_entropy_options x = {},
                        at::Tensor bias = {});

  /// @param hidden [B, ..., C]
  /// @param labels [B, ...], 0 <= labels < V, or `ignore_index`
  /// @returns the loss, a scalar in float32 (float64 for float64 inputs);
  /// without labels the logits [B, ..., V]
  at::Tensor forward(const at::Tensor& hidden,
                     const std::optional<at::Tensor>& labels);

  at::Tensor weight;
  at::Tensor bias;
  cross_entropy_options options;
};
TORCH_MODULE_IMPL(lm_head, lm_head_impl);

/// One that ranks share automatically, if its weight is tied only to an
/// Embedding that is shared, too, and its bias to nothing. For `tp_register`:
/// hidden states [B, ..., C] and labels [B, ...] -> a scalar, or hidden states
/// alone -> logits [B, ..., V].
struct distributed_lm_head : distributed<lm_head> {
  using distributed::distributed;
  using options = lm_head_options;
  static constexpr size_t arguments = 0;
};

} // namespace smp::nn
