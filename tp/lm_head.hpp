#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// The last layer of a language model, split by rows of its weight [V, C] and
/// of its bias [V], if it has one; the first peers get one more if V does not
/// divide evenly (paper, appendix on the smp.nn module,
/// `DistributedTransformerLMHead`). It computes the loss of hidden states [B,
/// ..., C] and labels [B, ...], and logits [B, ..., V] of hidden states alone.
extern const distribution lm_head_distribution;

} // namespace smp::nn
