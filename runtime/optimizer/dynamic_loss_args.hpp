#pragma once

#include <cstdint>

namespace smp {

/// How a dynamic loss scale finds the largest scale that gradients allow.
struct dynamic_loss_args {
  double init_scale = 65536;
  /// Factor by which the scale falls after nonfinite gradients, and rises.
  double scale_factor = 2;
  /// Number of consecutive steps with finite gradients after which it rises.
  uint64_t scale_window = 1000;
  /// At this scale nonfinite gradients are an error.
  double min_scale = 1;
};

} // namespace smp
