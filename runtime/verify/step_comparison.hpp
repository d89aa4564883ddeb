#pragma once

// Compares one step of the pipeline with the same step of one process: finds
// what differs, the cause first.

#include "runtime/verify/call_log.hpp"
#include "runtime/verify/findings.hpp"

#include <map>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// A parameter or buffer as the pipeline's ranks know it.
struct tensor_names {
  std::vector<std::string> all; // the first one identifies it
  bool is_buffer = false;
};

/// What one run recorded of a step.
struct step_evidence {
  observed_step log;
  /// By first name.
  std::map<std::string, at::Tensor> gradients;  // before clipping
  std::map<std::string, at::Tensor> parameters; // after the update
  std::map<std::string, at::Tensor> buffers;    // after the step
  double loss = 0;                              // mean over microbatches
  double gradient_norm = 0;
};

struct step_comparison_input {
  uint64_t step = 0; // from 1
  uint64_t microbatches = 0;
  uint64_t root_rank = 0; // which runs the step's body
  const std::vector<tensor_names>& names;
  const step_evidence& pipeline;
  const step_evidence& reference;
  /// The parameters before the step.
  const std::map<std::string, at::Tensor>& before;
  tolerance allowed;
  /// Gradients of zeros equal missing ones: TorchScript's optimised code
  /// computes zeros for tensors that are detached from the loss.
  bool zeros_for_none = false;
  /// Tensors between modules may have another floating-point type: under
  /// autocast TorchScript's optimised code casts in other places.
  bool casts_elsewhere = false;
  /// Descendants of modules that run as a whole, because ranks share them or
  /// their code was compiled: their calls are not compared.
  std::set<std::string> inside = {};
  /// First names of parameters whose gradients are summed over all rows in
  /// their own type by one process, as LibTorch does for a layer norm on a CPU,
  /// but in float32 by ranks that share the module.
  std::set<std::string> summed_apart = {};
};

/// Adds to `result` what was compared and what differs.
///
/// Forward, the first place is the first event in execution order: a call that
/// did not run, one that got different arguments, or one whose results differ
/// though nothing before it or inside it does. A different argument comes from
/// the code around the call if the same rank runs both; else it changed on its
/// way to the module. Backward runs the other way: the first place is the one
/// nearest to the loss. The gradient of a tensor counts at the call that made
/// it, not at enclosing calls that also return it.
void compare_step(const step_comparison_input& x, verify_summary& result);

} // namespace smp
