#pragma once

// The collectives of custom distributed modules (paper, appendix on creating
// them), each with its gradient. All peers of the calling rank's
// tensor-parallel group call them in the same module and order, with tensors of
// the same sizes. T is the number of peers; axes count from the end if they are
// negative.
//
// There are two kinds of values. Most belong to one peer, as its samples or its
// slice; their gradient is that of the losses of all peers together. Others are
// the same on all peers, and so is their gradient.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smp::nn {

/// [..., n, ...] -> [..., T n, ...]: the values of all peers along `dim`.
/// Backward: `reduce_scatter_for_tp`.
at::Tensor fused_allgather_for_tp(const at::Tensor& x, int64_t dim);

/// [..., T n, ...] -> [..., n, ...]: the sum over all peers, of which each gets
/// its slice of `dim`. Backward: `fused_allgather_for_tp`.
at::Tensor reduce_scatter_for_tp(const at::Tensor& x, int64_t dim);

/// Slices along `split_dim`, sends each peer one slice and merges what arrives
/// along `merge_dim`: [..., T a, ..., b, ...] -> [..., a, ..., T b, ...].
/// Backward: the same with both axes exchanged.
at::Tensor scatter_and_merge_for_tp(const at::Tensor& x, int64_t split_dim,
                                    int64_t merge_dim);

/// Sends each peer rows and receives rows from each, in any numbers: [sum of
/// `given`, ...] -> [sum of `taken`, ...]. Backward: the same with `given` and
/// `taken` exchanged.
/// @param given,taken rows to and from each peer, by rank
at::Tensor exchange_rows_for_tp(const at::Tensor& x,
                                const std::vector<int64_t>& given,
                                const std::vector<int64_t>& taken);

/// The sum over all peers, the same on all. Backward: the identity, because the
/// gradient is also the same on all.
at::Tensor fwd_allreduce_for_tp(const at::Tensor& x);

/// The identity: `x` is the same on all peers. Backward: the sum of the
/// gradients of all peers.
at::Tensor bwd_allreduce_for_tp(const at::Tensor& x);

/// [..., T n, ...] -> [..., n, ...]: the peer's slice, along `dim`, of a value
/// that is the same on all. Backward: all get the whole gradient.
at::Tensor narrow_for_tp(const at::Tensor& x, int64_t dim);

/// [..., n, ...] -> [..., T n, ...]: the values of all peers along `dim`, the
/// same on all. Backward: the peer's slice of the gradient.
at::Tensor merge_for_tp(const at::Tensor& x, int64_t dim);

// For smp's modules, whose gradients count samples once (R58). They work with
// both kinds of batches: peers have samples of their own, B each and N = T B
// together, or with `smp.prescaled_batch` all have the same N = B.

/// [B, ...] -> [N, ...]: the samples of all peers.
at::Tensor gather_batch_for_tp(const at::Tensor& x);

/// [N, ...] -> [B, ...]: the sum over all peers, of which each gets its own
/// samples.
at::Tensor scatter_batch_for_tp(const at::Tensor& x);

/// [B, ..., T n, ...] -> [N, ..., n, ...]: a slice of `dim` of all samples.
at::Tensor split_batch_for_tp(const at::Tensor& x, int64_t dim);

/// [N, ..., n, ...] -> [B, ..., T n, ...]: own samples with the whole of `dim`.
at::Tensor merge_batch_for_tp(const at::Tensor& x, int64_t dim);

/// [..., n, ...] -> [..., T n, ...]: the slices of all peers of a value that
/// does not depend on samples, for use with the peer's own samples.
at::Tensor gather_slices_for_tp(const at::Tensor& x, int64_t dim);

} // namespace smp::nn
