#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// nn.Embedding over the embedding dimension (paper, section 5.3): weight
/// [rows, d / T] on each peer. Indices [B, ...] of all peers (allgather) are
/// looked up, and each peer gets those of its samples, merged along the
/// embedding dimension: [B, ..., d] (scatter-and-merge).
extern const distribution embedding_distribution;

} // namespace smp::nn
