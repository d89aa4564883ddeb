#pragma once

#include "runtime/intercept/submodule.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/nn/lm_head.hpp"

#include <string>

namespace smp {

/// The last layer of a language model: gives logits or, so that tensor-parallel
/// ranks can shard it by vocabulary, computes the loss as well.
class language_head {
public:
  /// Becomes a child of `parent`.
  /// @param weight [V, C]: a new one, or that of an Embedding
  /// @param bias [V], which `parent` may own, too; undefined: there is none
  language_head(torch::nn::Module& parent, const torch::Tensor& weight,
                bool with_loss, const std::string& name = "lm_head",
                const torch::Tensor& bias = {});

  /// hidden: [B, T, C] @returns [B, T, V]
  torch::Tensor logits(const torch::Tensor& hidden);

  /// hidden: [B, T, C], labels: [B, T] int64
  /// @returns the mean cross entropy over the labels that are not -100
  torch::Tensor loss(const torch::Tensor& hidden, const torch::Tensor& labels);

private:
  submodule<tied_linear> plain_ = nullptr; // or
  submodule<nn::lm_head> with_loss_ = nullptr;
};

} // namespace smp
