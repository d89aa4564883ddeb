#pragma once

#include <cstdint>

namespace smp {

/// How a dynamic loss scale finds the largest value that gradients bear.
struct dynamic_loss_args {
  double init_scale = 65536;
  /// By which it falls after a step whose gradients are not finite, and rises.
  double scale_factor = 2;
  /// Steps with finite gradients, one after the other, after which it rises.
  uint64_t scale_window = 1000;
  /// Where gradients that are not finite are an error.
  double min_scale = 1;
};

} // namespace smp
