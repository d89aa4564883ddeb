#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// A transformer layer, heads split over peers (paper, appendix "Distributed
/// Transformer Implementations"). Hidden states [B, tokens, C] of each peer.
///
/// For speed: the first linears of each half are split over outputs, the second
/// over inputs. Norms, sums and dropout are done by each peer for its samples;
/// a half begins with an allgather of the normalised samples and ends with a
/// reduce-scatter by samples: the two halves of Megatron's allreduce, with the
/// same bytes. Backward likewise.
///
/// For memory: all linears are split over inputs, and their results summed and
/// split by channels. Between scatter-and-merge at both ends each peer has all
/// samples and 1 / T of the channels, also of norms and their parameters. In a
/// row of layers, only the first and the last one have these ends.
extern const distribution transformer_layer_distribution;

/// Its halves, as modules of their own.
extern const distribution attention_layer_distribution;
extern const distribution transformer_output_layer_distribution;

} // namespace smp::nn
