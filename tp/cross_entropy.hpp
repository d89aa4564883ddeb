#pragma once

// The loss of a language model without its full logits: each rank holds rows of
// the last layer's weight, and computes the logits of its words for the samples
// of all ranks (paper, appendix "Distributed Transformer Implementations").

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace smp {

/// Rows [first, first + second) of a table that peer `rank` of `peers` holds:
/// the first peers hold one more if the rows do not divide evenly.
std::pair<int64_t, int64_t> rows_of_peer(int64_t rows, int64_t rank,
                                         int64_t peers);

/// The options of `torch::nn::functional::cross_entropy`.
struct cross_entropy_options {
  /// A label that is ignored.
  int64_t ignore_index = -100;
  /// The mean over the labels that are not ignored; if false, their sum.
  bool mean = true;
  /// With `smp.prescaled_batch`, the gradient of the weight counts the samples
  /// that all peers have once, which smp's own modules need
  /// (`distribution::counts_samples_once`); if false, once per peer.
  bool counts_samples_once = false;
};

namespace nn {

/// The cross entropy of logits = hidden weight^T + bias. No rank ever has more
/// logits than those of B samples for its own V / T words: they are recomputed
/// in backward, the samples of one peer at a time. Besides hidden states and
/// their gradients, three numbers per sample are exchanged. Computed in
/// float32, or float64, whatever the types of the arguments.
/// @param hidden [B, ..., C], of this peer's samples
/// @param weight [V / T, C], the rows of this peer (`rows_of_peer`)
/// @param labels [B, ...], 0 <= labels < V, or `ignore_index`
/// @param vocabulary V
/// @param bias [V / T], of the same words, or undefined
/// @returns a scalar, the loss of this peer's samples; NaN if all labels are
/// ignored and the mean is wanted
/// @throws c10::IndexError for other labels
at::Tensor cross_entropy_for_tp(const at::Tensor& hidden,
                                const at::Tensor& weight,
                                const at::Tensor& labels, int64_t vocabulary,
                                const cross_entropy_options& x = {},
                                const at::Tensor& bias = {});

/// [B, ..., C] -> [B, ..., V]: the logits themselves, for callers that need
/// them.
at::Tensor logits_for_tp(const at::Tensor& hidden, const at::Tensor& weight,
                         int64_t vocabulary,
                         const cross_entropy_options& x = {},
                         const at::Tensor& bias = {});

} // namespace nn

} // namespace smp
