#pragma once

#include "tp/cross_entropy.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

namespace smp::nn {

/// The last layer of a language model, with its loss: where tensor-parallel
/// ranks share it, each has the logits of its part of the words only, and one
/// peer's samples at a time (paper, appendix on the smp.nn module). Logits then
/// go nowhere, also not to pp_rank 0. Used as
/// `smp::submodule<smp::nn::lm_head>`.
struct lm_head_impl : torch::nn::Module {
  /// @param weight [V, C]: a new one, or that of an Embedding
  explicit lm_head_impl(at::Tensor weight, cross_entropy_options x = {});

  /// @param hidden [B, ..., C]
  /// @param labels [B, ...], 0 <= labels < V, or `ignore_index`
  /// @returns the loss, a scalar in float32 (of float64 that); without labels
  /// the logits [B, ..., V]
  at::Tensor forward(const at::Tensor& hidden,
                     const std::optional<at::Tensor>& labels);

  at::Tensor weight;
  cross_entropy_options options;
};
TORCH_MODULE_IMPL(lm_head, lm_head_impl);

} // namespace smp::nn
