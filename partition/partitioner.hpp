#pragma once

// Decides which module runs on which device (paper, section 4.5).

#include "partition/manual.hpp"
#include "partition/search/problem.hpp"

#include <string_view>

namespace smp {

enum class partition_strategy : uint8_t {
  paper,    // exactly the paper's decision
  balanced, // never worse than the paper's in predicted time
};

/// @throws error (config) naming the allowed values.
partition_strategy parse_partition_strategy(std::string_view name);

struct partition_options {
  manual_options manual;
  double memory_weight = 0.8; // alpha
  partition_strategy strategy = partition_strategy::balanced;
  communication crossing = communication::untraced();
  /// Seconds of a microbatch on one device, both phases; 0 if unknown.
  double step_seconds = 0;
  /// Where the costs come from, as a text; may be empty.
  std::string basis;
  /// Segments of the execution order per device; more than 1 only with the
  /// "balanced" strategy.
  uint32_t chunks = 1;
};

/// The device of each module, and how good the partition is.
struct partition_plan {
  partition_options options;
  module_tree tree;
  cost_table costs;
  assignment node_device;
  assignment module_device;  // by module id
  assignment module_chunk;   // by module id, 0 to options.chunks - 1
  std::vector<double> loads; // per device, shares of the model's cost
  partition_score score;
  /// Score of the paper's strategy, for comparison.
  partition_score paper;
  /// Outcomes that a user hardly wants: a device without work.
  std::vector<std::string> warnings;
  /// Sentences about decisions that may surprise a user.
  std::vector<std::string> reasons;
};

/// Pure: the same model and options give the same plan on every rank.
/// @throws error (config) for errors in the user's input (see `module_tree`,
///         `cost_table`, `fixed_devices`).
partition_plan make_partition(const model_info& model,
                              const partition_options& options);

} // namespace smp
