#pragma once

// What a trace of the model (paper, appendix "Tracing") means for its costs.

#include "partition/module_tree.hpp"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// A tensor that went into a call; without sizes it is one of another kind.
struct traced_tensor {
  std::vector<int64_t> sizes = {};
  uint64_t element_bytes = 0;
  /// Along its first axis it is the same, which lies in memory once.
  bool repeats = false;
};

/// What one module did while the forward phase of a microbatch was traced.
struct module_trace {
  uint64_t calls = 0;
  /// Position in the order of first calls.
  uint64_t first = 0;
  /// Time of all calls, in seconds, without what it called.
  double seconds = 0;
  /// The most that it held at a time, without what it called; bytes, summed
  /// over its calls.
  uint64_t activation_bytes = 0;
  /// Tensors in and out, parameters left out; bytes of all calls.
  uint64_t transfer_bytes = 0;
  /// What went into each call.
  std::vector<std::vector<traced_tensor>> arguments = {};
  /// It could not run on the CPU and was traced on the GPU.
  bool on_gpu = false;
  /// What its caller did with its results, or always has to do: see
  /// `module_info`.
  bool waited_for = false;
  bool passed_on = false;
  std::set<module_id> added_to;
};

/// What a trace found.
struct trace_result {
  std::vector<module_trace> modules; // by module id
  /// What calls of the whole model take of the modules' time, in seconds: they
  /// were repeated until nothing was faster. The rest, the code around them,
  /// was measured once, and counts whatever else the machine did meanwhile. 0
  /// if nothing was repeated.
  double repeated_seconds = 0;
  bool times = true;  // were measured
  bool memory = true; // was measured
  /// Buffers that changed, by position in the walk of the model.
  std::set<uint32_t> changed;
  /// Why the trace ended before the forward phase did, and in which module.
  std::string failure;
  std::optional<module_id> failed;
};

/// Were times measured that are too short to decide by? `apply_trace` says
/// when.
bool is_noise(const trace_result& x);

/// Turns measurements into costs: order of children, own time, activations,
/// bytes and number of calls.
///
/// Times are as noisy as the machine, so modules that look alike (type, own
/// parameters, calls, bytes in and out) count as equally fast: with their
/// median. What was not called, because the microbatch did not need it or the
/// trace ended before, gets a time by its parameters. Where the forward phase
/// takes less than a millisecond, or what was measured more than once of it,
/// times are noise: each call counts the same, and all of them a millisecond.
/// @param element_bytes size of an element of the model's parameters, the unit
///        of memory
/// @pre `x` is of this model
void apply_trace(model_info& model, const trace_result& x,
                 double element_bytes);

/// @returns the time of a microbatch on one device, forward and backward, in
///          seconds: backward takes twice as long as forward. 0 if unknown.
double step_seconds(const model_info& model, const trace_result& x);

/// Ranks that share a module wait for each other in both phases, which one that
/// is traced alone does not. Adds the time of what each sends, as if nothing
/// was computed meanwhile, to that of the module, if it has one.
/// @param bytes that a rank sends in a microbatch, forward and backward
/// @returns the seconds that this takes, forward and backward; 0 if the module
///          has no time
double add_exchange(module_info& x, double bytes);

/// @returns where the costs come from: "measured on the CPU, ...".
/// @param device `smp.trace_device`
std::string describe_trace(const trace_result& x, double step_seconds,
                           const std::string& device);

/// @returns a sentence for each thing in the trace that a user should know: why
///          it ended early, what was not called, what ran on the GPU.
std::vector<std::string> explain_trace(const model_info& model,
                                       const trace_result& x);

} // namespace smp
