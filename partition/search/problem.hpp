#pragma once

// Input and output that all partitioning strategies have in common.

#include "partition/search/cost.hpp"

#include <limits>

namespace smp {

/// The device of each node of a tree.
using assignment = std::vector<uint32_t>;

/// Costs of a call between devices, as shares of the time that one device needs
/// for a microbatch, forward and backward.
struct communication {
  double request = 0; // per crossing call, there and back, both phases
  double byte = 0;    // per byte of such a call, both phases

  /// Without prices only the largest load counts. But costs have errors, and an
  /// assignment that scatters small modules to gain the last percent would pay
  /// a request for each. So loads within this share of the best count as equal,
  /// and the assignment with the fewest requests wins.
  double tolerance = 0.02;

  /// Bandwidth between two ranks, in bytes per second.
  static constexpr double rate = 5e9;

  /// @param step_seconds of one microbatch on one device, forward and backward.
  static communication from_times(double step_seconds,
                                  double request_seconds = 200e-6,
                                  double bytes_per_second = rate) {
    return {2 * request_seconds / step_seconds,
            2 / bytes_per_second / step_seconds};
  }

  /// For costs that are estimated from parameter counts.
  static communication untraced() {
    return {0, 0, 0.25};
  }
};

/// Calls of one module by another, as far as devices matter.
struct module_call {
  static constexpr size_t none = std::numeric_limits<size_t>::max();
  size_t caller; // nodes
  size_t callee;
  uint64_t bytes; // of one call
  uint64_t times = 1;
  size_t previous = none; // neighbouring calls of one request
  size_t next = none;
};

/// A tree, its costs, and the user's decisions.
struct partition_problem {
  /// @pre `fixed[0]` is 0
  partition_problem(const model_info& model, const module_tree& tree,
                    const cost_table& costs, uint32_t devices,
                    std::vector<std::optional<uint32_t>> fixed);

  const module_tree& tree;
  const cost_table& costs;
  uint32_t devices;
  /// Nodes with a given device: the root, and those that the user pinned.
  std::vector<std::optional<uint32_t>> fixed;
  std::vector<module_call> calls;
};

/// Quality of an assignment.
struct partition_score {
  double max_load = 0;   // share of the model's cost on the most loaded device
  uint64_t requests = 0; // calls between devices, per microbatch and phase
  uint64_t bytes = 0;    // of these calls, in bytes
  double predicted = 0;  // time of a microbatch relative to one device
};

/// Contribution of one call: the first and the last call of a run of calls that
/// are one request each carry half of the run's bytes.
struct call_cost {
  uint64_t requests = 0;
  uint64_t half_bytes = 0;
};

/// @returns the cost that `call` causes under `x`.
call_cost cost_of(const partition_problem& p, const module_call& call,
                  const assignment& x);

/// @returns the time that this costs, as a share (see `communication`).
inline double price(const communication& c, const call_cost& x) {
  return c.request * static_cast<double>(x.requests)
         + c.byte * static_cast<double>(x.half_bytes) / 2;
}

/// @returns the cost on each device.
std::vector<exact_cost> loads(const partition_problem& p, const assignment& x);

/// predicted = max load + request * requests + byte * bytes
partition_score score(const partition_problem& p, const assignment& x,
                      const communication& c);

} // namespace smp
