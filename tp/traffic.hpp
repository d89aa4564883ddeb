#pragma once

// What ranks that share a module send each other: the formulas of
// docs/shared_modules.md.

#include "tp/distributed_module.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace smp::nn {

/// A tensor argument of a call.
struct traced_argument {
  std::vector<int64_t> sizes = {};
  uint64_t element_bytes = 0;
  /// The same for all samples, and stored in memory once.
  bool repeats = false;
  /// Whether a mask has a gradient; all other arguments have one.
  bool has_gradient = false;
};

/// The calls of a shared module in one microbatch, on one rank.
struct traced_calls {
  /// Bytes of the tensors that go in and out.
  uint64_t bytes = 0;
  uint64_t calls = 1;
  int64_t peers = 1;
  /// All peers have the same samples.
  bool same_samples = false;
  /// Of each call, in order. For layers and their halves these count, not
  /// `bytes`.
  std::vector<std::vector<traced_argument>> arguments = {};
};

/// @returns the bytes that a rank sends its peers for them, forward and
/// backward; nothing for modules that hide what they exchange, which are those
/// of users' classes, and for layers whose arguments do not match their
/// options
std::optional<double> bytes_sent(const native_module& x,
                                 const traced_calls& how);

} // namespace smp::nn
