#pragma once

// Module trees and partition decisions as JSON, for tools.

#include "partition/partitioner.hpp"
#include "runtime/model/partition_notes.hpp"

#include <optional>
#include <string>

namespace smp {

/// A module tree to partition, given as data instead of a model.
struct partition_tree {
  model_info model;
  /// Seconds that a microbatch takes on one device, forward and backward.
  /// Without it, transfers between devices have no cost.
  std::optional<double> step_seconds;

  /// @returns what a transfer between devices costs in this tree.
  communication crossing() const;
};

/// Reads
///
///   {"nodes": [{"name": "root", "memory": 5, "compute": 5,
///               "children": [1, 2], "params": ["w"], "bytes": 0}, ...],
///    "step_seconds": 0.8}
///
/// Node 0 is the root. `memory` and `compute` are the module's own, in any
/// unit; `children` are in execution order; a parameter listed in two nodes is
/// shared. A node without `params` shares nothing. `bytes` (inputs and outputs
/// of one call) and `step_seconds` (a microbatch on one device, forward and
/// backward) let the decision weigh transfers; with `bytes` alone, `compute` is
/// taken as seconds of the forward phase, a third of the step. Other fields are
/// ignored.
/// @param name names the file in errors
/// @throws error (config) naming the first wrong node and its field
partition_tree parse_partition_tree(const std::string& text,
                                    const std::string& name);

/// @returns one object:
///
///   device      of each module of `model`
///   loads       of each device, as shares of the model's cost
///   max_cost    the largest of them
///   cut_requests, cut_bytes  what crosses, per microbatch and phase
///   predicted   time of a microbatch relative to one device
std::string decision_json(const partition_plan& plan);

/// @returns the same for the plan's nodes instead of its modules. Each node
/// also has `name`, `type`, `modules` (more than one if they cannot be
/// separated), its own `memory` (elements) and `compute` (seconds if traced),
/// `cost` (of its subtree; 1 for the root), `device`, `parent` (null for the
/// root) and `children`. The object also has the times of modules if known
/// (`modules`, see runtime/placement/module_times.hpp), the origin of the costs
/// (`costs`), possible surprises (`notes`) and, if there are any, remarks on
/// what tensor-parallel ranks share or do not share (`sharing`: of `remark`,
/// with `modules`). `parse_partition_tree` reads it.
std::string plan_json(const model_info& model, const partition_plan& plan,
                      const partition_notes& sharing = {});

} // namespace smp
