#pragma once

#include "transport/inspect.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// What a rank tells about the gradients of a step: positions of parameters in
/// the model's tensors, ascending.
struct gradient_report {
  /// Those whose gradient differs from what all replicas had last.
  std::vector<uint32_t> changed;
  /// Of them, those whose gradient is sparse.
  std::vector<uint32_t> sparse;
  /// Those that got a gradient after their bucket had begun.
  std::vector<uint32_t> late;
  /// Whether the step added to any gradient.
  bool trained = false;
  /// By bucket, how often it has begun, and how often it has to.
  std::vector<uint32_t> begun;
  std::vector<uint32_t> rounds;
  /// Names the buckets as this rank made them; 0: all ranks made them as the
  /// first one told.
  uint64_t layout = 0;
  /// Until then: in which order this rank's gradients were final.
  std::vector<uint32_t> order;

  /// Adds what another rank tells.
  void merge(const gradient_report& x);
};

template <class Inspector>
bool inspect(Inspector& f, gradient_report& x) {
  return f.object(x).fields(
    f.field("changed", x.changed), f.field("sparse", x.sparse),
    f.field("late", x.late), f.field("trained", x.trained),
    f.field("begun", x.begun), f.field("rounds", x.rounds),
    f.field("layout", x.layout), f.field("order", x.order));
}

} // namespace smp
