#pragma once

// What a comparison of the pipeline with one process found.

#include "runtime/verify/tensor_compare.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// In causal order within a step: earlier kinds cause later ones.
enum class finding_kind : uint8_t {
  owner,           // a parameter or buffer without exactly one owner
  microbatch,      // lost, or run twice
  calls,           // a module ran more or less often
  argument,        // of a call, different when it began
  result,          // of a call
  loss,            // of a microbatch, or their mean
  buffer,          // after the step
  seed,            // the gradient that backward begins with
  result_gradient, // of a result of a call
  gradient,        // of a parameter
  norm,            // of the whole gradient
  update,          // of a parameter
};

constexpr finding_kind last_of(finding_kind) {
  return finding_kind::update;
}

/// @returns "result gradient".
const char* to_string(finding_kind x);

/// One difference.
struct finding {
  finding_kind kind = finding_kind::result;
  uint64_t step = 0; // from 1; 0: before the first
  /// Path of the module where the runs diverge; empty for the model itself.
  std::string module;
  /// The parameter or buffer, if it is one.
  std::string tensor;
  std::optional<uint64_t> microbatch;
  std::optional<uint64_t> call; // of that module in that microbatch, from 0
  std::optional<uint64_t> rank;
  /// "result 0", "number of calls"
  std::string what;
  mismatch values;
};

/// @returns one line: where, what, both values.
std::string to_text(const finding& x);

/// How many tensors were compared and how far apart they were.
struct tally {
  uint64_t compared = 0;
  /// Of the tensor that came closest to its bound: how close (1 is at the
  /// bound), max|a - b| / max|b|, and its name.
  double share = 0;
  double relative = 0;
  std::string worst;

  void add(const std::string& name, const comparison& x);
};

/// The result of a whole comparison.
struct verify_summary {
  uint64_t steps = 0;
  /// How many of them were recorded, replayed a record, or began to replay one
  /// and continued without it; the others are dynamic (docs/modes.md).
  uint64_t recorded = 0, replayed = 0, fell_back = 0;
  uint64_t ranks = 0;
  uint64_t requests = 0;     // that ranks sent to each other
  uint64_t shared = 0;       // modules that ranks share
  uint64_t replicas = 1;     // that average gradients
  uint64_t microbatches = 0; // per step
  uint64_t modules = 0;      // whose calls were seen
  uint64_t calls = 0;
  tally losses, gradients, updates, buffers;
  /// Of calls: compared by digest, without a relative difference.
  uint64_t arguments = 0, results = 0, result_gradients = 0;
  uint64_t owned = 0; // parameters and buffers with exactly one owner
  /// The cause first. At most `max_findings` are kept, of `differences` in all.
  std::vector<finding> findings;
  uint64_t differences = 0; // all
  bool complete = false;    // else it was interrupted

  static constexpr size_t max_findings = 100;

  bool equal() const noexcept {
    return differences == 0;
  }

  uint64_t dynamic() const noexcept {
    return steps - recorded - replayed - fell_back;
  }

  void add(finding x);
};

/// Adds to `result` if the loss of the held-out data after a step differs.
void compare_held_out(uint64_t step, double pipeline, double reference,
                      const tolerance& allowed, verify_summary& result);

/// @returns the whole as a JSON object, see docs/verify.md
std::string to_json(const verify_summary& x);

/// @returns the last line for people: what was compared, or what differs first
/// @param way what to do if nothing crossed ranks
std::string to_text(const verify_summary& x,
                    std::string_view way
                    = "--split places modules on all of "
                      "them");

} // namespace smp
