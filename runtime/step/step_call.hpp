#pragma once

#include <cstdint>
#include <functional>

namespace smp {

/// What a rank must know about a step besides its body.
struct step_call {
  uint64_t microbatches = 1;
  /// Hash of the function and its arguments: steps with different hashes are
  /// recorded separately (R33). Only the value of pp_rank 0 counts.
  uint64_t signature = 0;
  /// The body has side effects and must not be run twice.
  bool no_rerun = false;
  /// Tells whether the body changed an argument of the step, which it would
  /// find so if it ran again. May be empty.
  std::function<bool()> inputs_changed = {};
};

} // namespace smp
