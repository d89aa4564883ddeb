#pragma once

#include <cstdint>

namespace smp {

/// What a rank must know about a step besides its body.
struct step_call {
  uint64_t microbatches = 1;
  /// Hash of the function and its arguments: steps with different hashes are
  /// recorded separately (R33). Only the value of pp_rank 0 counts.
  uint64_t signature = 0;
  /// The body has side effects and must not be run twice.
  bool no_rerun = false;
};

} // namespace smp
