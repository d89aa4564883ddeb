#pragma once

// Logits that are computed when something reads them, or never: their cross
// entropy can be computed from what they are made of.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace smp {

/// What logits are computed from: hidden states and the last layer.
class logits_source {
public:
  virtual ~logits_source() = default;

  /// @returns [B, ..., V], recorded by autograd
  virtual at::Tensor logits() = 0;

  /// The cross entropy of some rows of the logits [B ..., V], without these.
  /// @param rows [n], undefined: all, in their order
  /// @param labels [n], 0 <= labels < V, or `ignore_index`
  /// @returns the mean or the sum, a scalar
  virtual at::Tensor cross_entropy(const at::Tensor& rows,
                                   const at::Tensor& labels,
                                   int64_t ignore_index, bool mean)
    = 0;

  /// Called with each tensor that stands for the logits or for some of their
  /// rows, as long as they are late.
  virtual void made(const at::Tensor&) {
    // nop
  }
};

/// A tensor for logits that are not computed yet, whatever the code around does
/// with them. Operations that select or rearrange rows give other late logits;
/// `cross_entropy_loss` of them is computed without them, unless it has class
/// weights, label smoothing or one loss per row; any other operation computes
/// with the logits themselves, which are then made once. (It is a promise. With
/// the logits, all that was selected from them become ordinary tensors and
/// views, in place.)
/// @param x is asked by one thread at a time
/// @param like a meta tensor of the same sizes and type, row-major
/// @param gradients something that gradients of the logits reach; null: the
/// logits have none
at::Tensor
make_late_logits(std::shared_ptr<logits_source> x, const at::Tensor& like,
                 const std::optional<torch::autograd::Edge>& gradients);

/// Makes late logits among `xs` ordinary tensors; others stay what they are.
void read_late_logits(const std::vector<at::Tensor>& xs);

/// Runs `op` if it needs no logits; else makes those among its arguments
/// ordinary tensors.
/// @param stack arguments of `op`, replaced by its result if it ran
/// @returns whether it ran
bool run_without_logits(const c10::OperatorHandle& op,
                        torch::jit::Stack& stack);

} // namespace smp
