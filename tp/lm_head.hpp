#pragma once

#include "tp/cross_entropy.hpp"
#include "tp/distributed_module.hpp"

#include <cstdint>
#include <string>

namespace smp::nn {

/// What one rank has of the last layer of a language model.
class language_head final : public distributed_module {
public:
  /// @param x its parameters already hold the slices
  language_head(const native_module& x, int64_t vocabulary);

  /// [B, ..., C] -> [B, ..., V]; with labels [B, ...] a scalar
  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override;

  /// The loss without the logits: `cross_entropy_for_tp`.
  at::Tensor cross_entropy(const at::Tensor& hidden, const at::Tensor& labels,
                           cross_entropy_options x) const;

  int64_t vocabulary() const noexcept {
    return vocabulary_;
  }

  bool requires_grad() const {
    return weight_.requires_grad()
           || (bias_.defined() && bias_.requires_grad());
  }

private:
  std::string name_;
  at::Tensor weight_;
  at::Tensor bias_; // undefined if there is none
  int64_t vocabulary_;
  cross_entropy_options options_;
};

/// The last layer of a language model, split by rows of its weight [V, C] and
/// of its bias [V], if it has one; the first peers get one more if V does not
/// divide evenly (paper, appendix on the smp.nn module,
/// `DistributedTransformerLMHead`). It computes the loss of hidden states [B,
/// ..., C] and labels [B, ...], and logits [B, ..., V] of hidden states alone.
extern const distribution lm_head_distribution;

} // namespace smp::nn
