#pragma once

#include "partition/module_tree.hpp"

namespace smp {

/// The user's settings for placement (manual placement of the paper's API).
struct manual_options {
  uint32_t devices = 1;        // smp.pipeline_parallel_degree
  bool automatic = true;       // smp.auto_partition
  uint32_t default_device = 0; // smp.default_partition, if not automatic
};

/// Finds the nodes whose device the user decided. A pinned module takes its
/// subtree along, except for parts that are pinned elsewhere. Without automatic
/// partitioning all other nodes are on the default device. The root is always
/// on device 0, where the step runs.
/// @returns the device of each node, or nothing where smp may choose.
/// @throws error (config) naming the module if a device does not exist, the
///         root is pinned elsewhere, modules of one node are pinned to several
///         devices, or a module is pinned away from a parent that it cannot
///         leave.
std::vector<std::optional<uint32_t>> fixed_devices(const model_info& model,
                                                   const module_tree& tree,
                                                   const manual_options& x);

/// @returns "module blocks.0", or "the root".
std::string describe_module(const model_info& model, module_id x);

/// @returns the reason as a clause: "they share parameter wte.weight".
std::string describe_reason(const merge_reason& x);

} // namespace smp
