#pragma once

#include "tp/distributed_module.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace smp::nn {

/// Layer norm over axes, of the last of which each peer has a slice. Moments
/// are computed and merged in float32 (float64 for that) from deviations from
/// means, so that a mean far from 0 costs no precision (Chan, Golub, LeVeque
/// 1979). x: [..., n1, ..., nk / T]; weight, bias: [n1, ..., nk / T] or
/// undefined
/// @param axes k
/// @returns as `x`; float32 under autocast, as LibTorch's
at::Tensor layer_norm_for_tp(const at::Tensor& x, int64_t axes,
                             const at::Tensor& weight, const at::Tensor& bias,
                             double eps);

/// RMS norm: scales to a mean square of 1 (Zhang and Sennrich 2019), in float32
/// or float64. x: [..., n / T], weight: [n / T]
at::Tensor rms_norm_for_tp(const at::Tensor& x, const at::Tensor& weight,
                           double eps);

/// nn.LayerNorm split over channels (paper, appendix on memory-optimized
/// distribution): weight and bias [..., n / T] on each peer. x [B, ..., n] of
/// each peer becomes [T B, ..., n / T] of all samples (scatter-and-merge), is
/// normalised with moments over all peers, and is converted back.
extern const distribution layer_norm_distribution;

} // namespace smp::nn
