#pragma once

// What the forward phase of a microbatch leaves for its backward phase.

#include "partition/partitioner.hpp"
#include "runtime/session/partitioning.hpp"
#include "runtime/train/data.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace smp {

struct walked_model;

/// Bytes that one microbatch keeps, as the autograd graph of one process tells
/// them: each node says which tensors it saved, and belongs to the module that
/// made it. Where a rank computes again, it keeps arguments instead.
struct kept_activations {
  /// By module: what the owner of the module keeps because of it, parameters
  /// left out.
  std::vector<uint64_t> saved;
  /// By module: arguments of its calls that are computed again.
  std::vector<uint64_t> arguments;
  /// By device: the most that one such call has in arguments.
  std::vector<uint64_t> largest_call;
  /// By device: the most that is there while backward computes again.
  std::vector<uint64_t> computed_again;
};

/// Runs `loss`, the forward phase of a microbatch, with gradients.
/// @param inputs tensors of the microbatch, which pp_rank 0 has in any case
/// @throws error (unsupported) naming the node that does not tell, and what
///         `loss` throws
kept_activations measure_kept(const walked_model& model,
                              const partition_decision& decision,
                              const batch& inputs,
                              const std::function<at::Tensor()>& loss);

} // namespace smp
