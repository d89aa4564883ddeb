#pragma once

// What ranks that share a module send each other: the formulas of
// docs/tensor_parallel.md.

#include "tp/distributed_module.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace smp::nn {

/// A tensor that goes into a call.
struct traced_argument {
  std::vector<int64_t> sizes = {};
  uint64_t element_bytes = 0;
  /// All samples have the same, which lies in memory once.
  bool repeats = false;
  /// Of a mask; all else has one.
  bool has_gradient = false;
};

/// The calls of a shared module in one microbatch, on one rank.
struct traced_calls {
  /// Of the tensors that go in and out.
  uint64_t bytes = 0;
  uint64_t calls = 1;
  int64_t peers = 1;
  /// All peers have the same samples.
  bool same_samples = false;
  /// Of each call, in their order. Of layers and their halves these tell, not
  /// `bytes`.
  std::vector<std::vector<traced_argument>> arguments = {};
};

/// @returns the bytes that a rank sends its peers for them, forward and
/// backward; nothing for modules that hide what they exchange, which are those
/// of users' classes, and for layers that take something else than their
/// options tell
std::optional<double> bytes_sent(const native_module& x,
                                 const traced_calls& how);

} // namespace smp::nn
