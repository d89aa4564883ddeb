#pragma once

// The collectives of custom distributed modules (paper, appendix on creating
// them), each with its gradient. All peers of the calling rank's
// tensor-parallel group call them in the same module and order, with tensors of
// the same sizes. T is the number of peers; axes count from the end if they are
// negative.
//
// Two kinds of values meet here. Most belong to one peer: its samples, its
// slice; their gradient is what the losses of all peers say of them together.
// Others are the same on all peers, and so is their gradient.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smp::nn {

/// [..., n, ...] -> [..., T n, ...]: what all peers have, along `dim`.
/// Backward: `reduce_scatter_for_tp`.
at::Tensor fused_allgather_for_tp(const at::Tensor& x, int64_t dim);

/// [..., T n, ...] -> [..., n, ...]: the sum over all peers, of which each gets
/// its slice of `dim`. Backward: `fused_allgather_for_tp`.
at::Tensor reduce_scatter_for_tp(const at::Tensor& x, int64_t dim);

/// Slices along `split_dim`, gives each peer one and merges what comes along
/// `merge_dim`: [..., T a, ..., b, ...] -> [..., a, ..., T b, ...]. Backward:
/// the same with both axes exchanged.
at::Tensor scatter_and_merge_for_tp(const at::Tensor& x, int64_t split_dim,
                                    int64_t merge_dim);

/// Gives each peer rows of its own and takes what they gave, as many as there
/// are: [sum of `given`, ...] -> [sum of `taken`, ...]. Backward: the same with
/// both exchanged.
/// @param given,taken rows to and from each peer, by rank
at::Tensor exchange_rows_for_tp(const at::Tensor& x,
                                const std::vector<int64_t>& given,
                                const std::vector<int64_t>& taken);

/// The sum over all peers, a value that all have. Backward: nothing, as they
/// have its gradient, too.
at::Tensor fwd_allreduce_for_tp(const at::Tensor& x);

/// Nothing: `x` is a value that all peers have. Backward: the sum over what
/// each did with it.
at::Tensor bwd_allreduce_for_tp(const at::Tensor& x);

/// [..., T n, ...] -> [..., n, ...]: its slice, along `dim`, of a value that
/// all peers have. Backward: all have the whole gradient again.
at::Tensor narrow_for_tp(const at::Tensor& x, int64_t dim);

/// [..., n, ...] -> [..., T n, ...]: what all peers have, along `dim`, a value
/// that all have. Backward: the slice of its gradient.
at::Tensor merge_for_tp(const at::Tensor& x, int64_t dim);

// For smp's modules, whose gradients count samples once (R58). The same in both
// kinds of batches: peers have samples of their own, B each
// and N = T B together, or with `smp.prescaled_batch` all have the same N = B.

/// [B, ...] -> [N, ...]: the samples of all peers.
at::Tensor gather_batch_for_tp(const at::Tensor& x);

/// [N, ...] -> [B, ...]: the sum over all peers, of which each gets its
/// samples.
at::Tensor scatter_batch_for_tp(const at::Tensor& x);

/// [B, ..., T n, ...] -> [N, ..., n, ...]: a slice of `dim` of all samples.
at::Tensor split_batch_for_tp(const at::Tensor& x, int64_t dim);

/// [N, ..., n, ...] -> [B, ..., T n, ...]: its samples, `dim` as a whole.
at::Tensor merge_batch_for_tp(const at::Tensor& x, int64_t dim);

/// [..., n, ...] -> [..., T n, ...]: what all peers have of a value that does
/// not depend on samples, to be used for own samples.
at::Tensor gather_slices_for_tp(const at::Tensor& x, int64_t dim);

} // namespace smp::nn
