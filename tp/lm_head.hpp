#pragma once

#include "tp/distributed_module.hpp"

namespace smp::nn {

/// The last layer of a language model, by rows of its weight [V, C] and of its
/// bias [V], if it has one, of which the first peers have one more if they
/// cannot be divided (paper, appendix on the smp.nn module,
/// `DistributedTransformerLMHead`). Of hidden states [B, ..., C] and labels
/// [B, ...] it makes their loss, of hidden states alone logits [B, ..., V].
extern const distribution lm_head_distribution;

} // namespace smp::nn
