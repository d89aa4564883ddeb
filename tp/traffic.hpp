#pragma once

// What ranks that share a module send each other: the formulas of
// docs/tensor_parallel.md.

#include "tp/distributed_module.hpp"

#include <cstdint>
#include <optional>

namespace smp::nn {

/// The calls of a shared module in one microbatch, on one rank.
struct traced_calls {
  /// Of the tensors that go in and out.
  uint64_t bytes = 0;
  uint64_t calls = 1;
  int64_t peers = 1;
  /// All peers have the same samples.
  bool same_samples = false;
};

/// @returns the bytes that a rank sends its peers for them, forward and
/// backward, with a gradient of what goes in and without what masks and
/// positions take; nothing for modules that hide what they exchange, which are
/// those of users' classes and layers with cross-attention
std::optional<double> bytes_sent(const native_module& x,
                                 const traced_calls& how);

} // namespace smp::nn
