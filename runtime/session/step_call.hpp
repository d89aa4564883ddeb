#pragma once

#include <cstdint>

namespace smp {

/// What a rank has to know of a step besides its body.
struct step_call {
  uint64_t microbatches = 1;
  /// Of the function and its arguments: steps that differ in it are recorded
  /// apart (R33). Only that of pp_rank 0 counts.
  uint64_t signature = 0;
  /// The body has side effects and must not be run twice.
  bool no_rerun = false;
};

} // namespace smp
