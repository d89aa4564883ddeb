#pragma once

// What the forward phase of a microbatch leaves for its backward phase.

#include "partition/partitioner.hpp"
#include "runtime/data/data.hpp"
#include "runtime/placement/partitioning.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace smp {

struct walked_model;

/// Bytes that one microbatch keeps, read from the autograd graph of one
/// process: each node reports the tensors it saved and belongs to the module
/// that made it. A rank that recomputes a call keeps its arguments instead.
struct kept_activations {
  /// By module: what the owner of the module keeps because of it, without
  /// parameters.
  std::vector<uint64_t> saved;
  /// By module: arguments of those of its calls that backward recomputes.
  std::vector<uint64_t> arguments;
  /// By device: the largest arguments of one such call.
  std::vector<uint64_t> largest_call;
  /// By device: the most that recomputation holds at one time.
  std::vector<uint64_t> computed_again;
};

/// Runs `loss`, the forward phase of a microbatch, with gradients.
/// @param inputs tensors of the microbatch, which pp_rank 0 holds in any case
/// @throws error (unsupported) naming a node that does not report what it
///         saved, and what `loss` throws
kept_activations measure_kept(const walked_model& model,
                              const partition_decision& decision,
                              const batch& inputs,
                              const std::function<at::Tensor()>& loss);

} // namespace smp
