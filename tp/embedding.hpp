#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// nn.Embedding split over the embedding dimension (paper, section 5.3): weight
/// [rows, d / T] on each peer. Each peer looks up the indices [B, ...] of all
/// peers (allgather), and gets the results of its own samples, merged along the
/// embedding dimension: [B, ..., d] (scatter-and-merge).
extern const distribution embedding_distribution;

} // namespace smp::nn
