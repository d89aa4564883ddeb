#pragma once

// The loss of a language model without its logits: ranks have rows of the last
// layer's weight, and each computes the logits of its words for the samples of
// all (paper, appendix "Distributed Transformer Implementations").

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace smp {

/// Rows [first, first + second) of a table that peer `rank` of so many holds:
/// the first ones have one more if they cannot be divided.
std::pair<int64_t, int64_t> rows_of_peer(int64_t rows, int64_t rank,
                                         int64_t peers);

/// As of `torch::nn::functional::cross_entropy`.
struct cross_entropy_options {
  /// A label that does not count.
  int64_t ignore_index = -100;
  /// The mean over labels that count, else their sum.
  bool mean = true;
  /// With `smp.prescaled_batch`, the gradient of the weight counts the samples
  /// that all peers have once, as it has to for smp's own modules
  /// (`distribution::counts_samples_once`); else as often as there are peers.
  bool counts_samples_once = false;
};

namespace nn {

/// The cross entropy of logits = hidden weight^T + bias, of which no rank ever
/// has more than those of B samples for its own V / T words: they are computed
/// again in backward, the samples of one peer at a time. Three numbers for each
/// sample are exchanged, besides hidden states and their gradients. In float32,
/// or float64, whatever the type of the others.
/// @param hidden [B, ..., C], of this peer's samples
/// @param weight [V / T, C], the rows of this peer (`rows_of_peer`)
/// @param labels [B, ...], 0 <= labels < V, or `ignore_index`
/// @param vocabulary V
/// @param bias [V / T], of the same words, or undefined
/// @returns a scalar, the loss of this peer's samples; not a number if no label
/// counts and the mean is wanted
/// @throws c10::IndexError for other labels
at::Tensor cross_entropy_for_tp(const at::Tensor& hidden,
                                const at::Tensor& weight,
                                const at::Tensor& labels, int64_t vocabulary,
                                const cross_entropy_options& x = {},
                                const at::Tensor& bias = {});

/// [B, ..., C] -> [B, ..., V]: the logits themselves, for who wants to have
/// them.
at::Tensor logits_for_tp(const at::Tensor& hidden, const at::Tensor& weight,
                         int64_t vocabulary,
                         const cross_entropy_options& x = {},
                         const at::Tensor& bias = {});

} // namespace nn

} // namespace smp
