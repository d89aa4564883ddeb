#pragma once

// What every strategy starts from and what it answers.

#include "partition/cost.hpp"

#include <limits>

namespace smp {

/// The device of each node of a tree.
using assignment = std::vector<uint32_t>;

/// What crossing from one device to another costs, as shares of the time that
/// one device needs for a microbatch, forward and backward.
struct communication {
  double request = 0; // per call that crosses, there and back, both phases
  double byte = 0;    // per byte of such a call, both phases

  /// Without prices the largest load counts alone. But costs have errors, and
  /// an assignment that scatters small modules for the last percent would pay
  /// for each with a request: loads within this share of the best count as
  /// equal, and the one with the fewest requests is taken.
  double tolerance = 0.02;

  /// Between two ranks, in bytes per second.
  static constexpr double rate = 5e9;

  /// @param step_seconds one microbatch on one device, forward and backward.
  static communication from_times(double step_seconds,
                                  double request_seconds = 200e-6,
                                  double bytes_per_second = rate) {
    return {2 * request_seconds / step_seconds,
            2 / bytes_per_second / step_seconds};
  }

  /// For costs that were guessed from parameter counts.
  static communication untraced() {
    return {0, 0, 0.25};
  }
};

/// The calls of a module by another, as far as devices matter.
struct module_call {
  static constexpr size_t none = std::numeric_limits<size_t>::max();
  size_t caller; // nodes
  size_t callee;
  uint64_t bytes; // of one call
  uint64_t times = 1;
  size_t previous = none; // calls that run on within one request
  size_t next = none;
};

/// A tree, its costs, and what the user decided.
struct partition_problem {
  /// @pre `fixed[0]` is 0
  partition_problem(const model_info& model, const module_tree& tree,
                    const cost_table& costs, uint32_t devices,
                    std::vector<std::optional<uint32_t>> fixed);

  const module_tree& tree;
  const cost_table& costs;
  uint32_t devices;
  /// Nodes whose device is given: the root, and what the user pinned.
  std::vector<std::optional<uint32_t>> fixed;
  std::vector<module_call> calls;
};

/// How good an assignment is.
struct partition_score {
  double max_load = 0;   // share of the model's cost on the fullest device
  uint64_t requests = 0; // calls that cross, per microbatch and phase
  uint64_t bytes = 0;    // of these calls
  double predicted = 0;  // time of a microbatch relative to one device
};

/// What one call contributes: a call that begins or ends a run of calls that
/// are one request carries half of the run's bytes.
struct call_cost {
  uint64_t requests = 0;
  uint64_t half_bytes = 0;
};

/// @returns what `call` causes under `x`.
call_cost cost_of(const partition_problem& p, const module_call& call,
                  const assignment& x);

/// @returns the time that this costs.
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
