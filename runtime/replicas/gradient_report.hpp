#pragma once

#include "transport/inspect.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// A rank's report on the gradients of a step: positions of parameters in the
/// model's tensors, ascending.
struct gradient_report {
  /// Parameters whose gradient differs from the last that all replicas had.
  std::vector<uint32_t> changed;
  /// The subset of `changed` whose gradient is sparse.
  std::vector<uint32_t> sparse;
  /// Parameters that got a gradient after their bucket had begun.
  std::vector<uint32_t> late;
  /// Whether the step added to any gradient.
  bool trained = false;
  /// By bucket, how often it has begun, and how often it must begin.
  std::vector<uint32_t> begun;
  std::vector<uint32_t> rounds;
  /// Identifies this rank's bucket layout; 0: all ranks use the layout that the
  /// first rank determined.
  uint64_t layout = 0;
  /// Until then: the order in which this rank's gradients became final.
  std::vector<uint32_t> order;

  /// Merges the report of another rank.
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
