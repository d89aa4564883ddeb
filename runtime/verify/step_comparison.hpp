#pragma once

// One step of the pipeline against the same step of one process: what differs,
// the cause first.

#include "runtime/verify/call_log.hpp"
#include "runtime/verify/findings.hpp"

#include <map>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// A parameter or buffer as the pipeline's ranks know it.
struct tensor_names {
  std::vector<std::string> all; // the first one stands for it
  bool is_buffer = false;
};

/// What one run left of a step.
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
  /// The parameters when the step began.
  const std::map<std::string, at::Tensor>& before;
  tolerance allowed;
  /// A gradient of zeros is as good as none: TorchScript's optimised code gives
  /// them for what is detached from the loss.
  bool zeros_for_none = false;
  /// In between, tensors may have another floating-point type: under autocast
  /// TorchScript's optimised code casts in other places.
  bool casts_elsewhere = false;
  /// Modules below those that ranks share as a whole: they are not called.
  std::set<std::string> inside = {};
  /// First names of parameters whose gradients one process adds up over all
  /// rows in their own type, as LibTorch does for a layer norm on a CPU, and
  /// ranks that share the module in float32.
  std::set<std::string> summed_apart = {};
};

/// Adds to `result` what was compared and what differs.
///
/// Forward, the first place is the first event in execution order: a call that
/// did not run, one whose arguments came in different, or one whose results
/// differ though everything before, also inside of it, does not. A different
/// argument is the doing of the code around the call if the same rank runs
/// both; else it changed on its way to the module. Backward runs the other
/// way: there it is the place nearest to the loss. The gradient of a tensor
/// counts at the call that made it, not at those around it that return it, too.
void compare_step(const step_comparison_input& x, verify_summary& result);

} // namespace smp
