#pragma once

// Turns a trace of the model (paper, appendix "Tracing") into its costs.

#include "partition/module_tree.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// A tensor argument of a call; without sizes: an argument of another kind.
struct traced_tensor {
  std::vector<int64_t> sizes = {};
  uint64_t element_bytes = 0;
  /// All slices along its first axis are equal and lie in memory once.
  bool repeats = false;
};

/// Behaviour of one module in the traced forward phase of a microbatch.
struct module_trace {
  uint64_t calls = 0;
  /// Position in the order of first calls.
  uint64_t first = 0;
  /// Seconds of all calls, without the modules that it called.
  double seconds = 0;
  /// Peak bytes that it held, without the modules that it called, summed over
  /// its calls.
  uint64_t activation_bytes = 0;
  /// Tensors in and out, without parameters; bytes of all calls.
  uint64_t transfer_bytes = 0;
  /// The arguments of each call.
  std::vector<std::vector<traced_tensor>> arguments = {};
  /// It could not run on the CPU, so it was traced on the GPU.
  bool on_gpu = false;
  /// How its caller used its results, or always has to use them: see
  /// `module_info`.
  bool waited_for = false;
  bool passed_on = false;
  std::set<module_id> added_to;
  /// Modules that called it with an argument or result that cannot be sent to
  /// another rank, and why.
  std::map<module_id, std::string> unsendable;
};

/// Result of a trace.
struct trace_result {
  std::vector<module_trace> modules; // by module id
  /// The part of the modules' time, in seconds, that is in calls of the whole
  /// model: these were repeated until no repetition was faster. The rest, the
  /// code around them, was measured once, and includes whatever else the
  /// machine did meanwhile. 0 if nothing was repeated.
  double repeated_seconds = 0;
  bool times = true;   // were measured
  bool memory = true;  // was measured
  bool on_gpu = false; // all modules ran there
  /// Parameters and buffers that changed, by index in the walk of the model.
  std::set<uint32_t> changed;
  /// Modules that changed other state, and how: "sets its attribute 'calls'".
  std::map<uint32_t, std::string> stateful;
  /// Why the trace ended before the forward phase did; `failed` is the module.
  std::string failure;
  std::optional<module_id> failed;
};

/// Tells whether times were measured but are too short to decide by; see
/// `apply_trace`.
bool is_noise(const trace_result& x);

/// Turns measurements into costs: order of children, own time, activations,
/// bytes and number of calls.
///
/// Times are as noisy as the machine, so modules that look alike (type, own
/// parameters, calls, bytes in and out) count as equally fast and get their
/// median. A module that was not called, as the microbatch did not need it or
/// the trace ended early, gets a time by its parameters. If the forward phase,
/// or the part measured more than once, takes less than a millisecond, times
/// are noise: each call counts the same, and all together a millisecond.
/// @param element_bytes size of an element of the model's parameters, the unit
///        of memory
/// @pre `x` is a trace of this model
void apply_trace(model_info& model, const trace_result& x,
                 double element_bytes);

/// @returns the time of a microbatch on one device, forward and backward, in
///          seconds, with backward twice as long as forward. 0 if unknown.
double step_seconds(const model_info& model, const trace_result& x);

/// Ranks that share a module wait for each other in both phases, which a module
/// traced alone does not show. Adds to the time of the module, if it has one,
/// that of what each rank sends, as if nothing was computed meanwhile.
/// @param bytes that one rank sends per microbatch, forward and backward
/// @returns the seconds that this takes, forward and backward; 0 if the module
///          has no time
double add_exchange(module_info& x, double bytes);

/// @returns the origin of the costs: "measured on the CPU, ...".
std::string describe_trace(const trace_result& x, double step_seconds);

/// @returns a sentence for each finding of the trace that a user should know:
///          why it ended early, what was not called, what ran on the GPU.
std::vector<std::string> explain_trace(const model_info& model,
                                       const trace_result& x);

} // namespace smp
