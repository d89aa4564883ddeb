#pragma once

// Trees and decisions of the partition as JSON, for tools.

#include "partition/partitioner.hpp"
#include "runtime/session/module_remarks.hpp"

#include <optional>
#include <string>

namespace smp {

/// A tree that somebody wants partitioned without having its model.
struct partition_tree {
  model_info model;
  /// Time of a microbatch on one device, forward and backward, if the tree
  /// tells; else what crosses has no price.
  std::optional<double> step_seconds;

  /// @returns what crossing costs in this tree.
  communication crossing() const;
};

/// Reads
///
///   {"nodes": [{"name": "root", "memory": 5, "compute": 5,
///               "children": [1, 2], "params": ["w"], "bytes": 0}, ...],
///    "step_seconds": 0.8}
///
/// Node 0 is the root. `memory` and `compute` are the module's own, in any
/// unit, `children` stand in execution order, a parameter in two nodes is
/// shared. Without `params` a node shares nothing. `bytes` (inputs and outputs
/// of one call) and `step_seconds` (a microbatch on one device, forward and
/// backward) let the decision weigh transfers; with `bytes` alone `compute` is
/// taken as seconds of the forward phase, a third of the step. Other fields
/// are ignored.
/// @param name stands for the file in errors
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

/// @returns the same for the nodes of the plan instead of its modules, and
/// each of them with `name`, `type`, `modules` (more than one if they cannot be
/// apart), own `memory` (elements) and `compute` (seconds if traced), `cost`
/// (with all below it; 1 for the root), `device`, `parent` (null for the root)
/// and `children`; the times of modules, if there are any (`modules`, see
/// runtime/session/module_times.hpp), where the costs come from (`costs`), what
/// may surprise (`notes`), and if anything is said of it, what tensor-parallel
/// ranks share and what not (`sharing`: of `remark`, with `modules`).
/// `parse_partition_tree` reads it.
std::string plan_json(const model_info& model, const partition_plan& plan,
                      const module_remarks& sharing = {});

} // namespace smp
