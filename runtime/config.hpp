#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// The table [smp] of the configuration, and what a session needs besides
/// (docs: the table of keys in docs/config.md). Plain values; `validate` has
/// the rules that tie them together.
struct session_config {
  uint64_t pipeline_parallel_degree = 1;
  uint64_t microbatches = 1;
  /// "simple" or "interleaved".
  std::string pipeline = "interleaved";
  /// Default: partitions + 2, for "simple" all microbatches (R2).
  std::optional<uint64_t> active_microbatches = {};
  bool auto_partition = true;
  uint64_t default_partition = 0;
  /// "balanced" or "paper".
  std::string strategy = "balanced";
  /// alpha of the cost; default 0.8 for memory, 0.2 for speed.
  std::optional<double> memory_weight = {};
  std::string optimize = "memory";
  std::string placement_strategy = "cluster";
  uint64_t seed = 1;
  /// Kernel threads per rank; 0: cores / ranks on this machine, at least 1.
  uint64_t threads = 0;
  /// Non-loopback interfaces may be used although UCX's tcp has no
  /// authentication.
  bool trusted_network = false;
};

/// Checks each value and what ties keys together.
/// @throws error (config) naming the keys, one line for each error
void validate(const session_config& x);

/// Values that cannot go together.
struct config_conflict {
  /// All keys that take part, e.g. "smp.microbatches".
  std::vector<std::string> keys;
  std::string text;
};

/// @returns the rules on several keys that `x` breaks
std::vector<config_conflict> conflicts(const session_config& x);

/// @returns `active_microbatches` or, if not set, its default (R2).
uint64_t effective_active_microbatches(const session_config& x);

/// @returns `memory_weight` or, if not set, what `optimize` stands for.
double effective_memory_weight(const session_config& x);

} // namespace smp
