#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// nn.Linear split over its input channels (paper, figure "Tensor-parallel
/// distribution of an affine layer"): weight [out, in / T] on each peer, the
/// bias on the first. x [B, ..., in] of each peer becomes [T B, ..., in / T] of
/// all samples (all-to-all) and is multiplied; the products are summed and
/// split by samples, [B, ..., out] (reduce-scatter).
extern const distribution linear_distribution;

/// The layer Conv1D of Hugging Face's GPT-2, which is a Linear whose weight is
/// [in, out].
extern const distribution conv1d_distribution;

} // namespace smp::nn
