#pragma once

// Simulates a schedule before it runs (R32).

#include "partition/schedule/program.hpp"
#include "partition/schedule/schedule.hpp"

namespace smp {

/// One piece of work, for as long as it held the token of its device.
struct timeline_entry {
  uint32_t device = 0;
  task what;
  double begin = 0; // seconds
  double end = 0;
};

/// Predicted behaviour of a step.
struct schedule_report {
  double makespan = 0; // seconds
  /// 1 - executing time / (devices x makespan)
  double bubble = 0;
  std::vector<double> busy; // seconds, per device
  /// Peak number of microbatches whose activations are kept, per device.
  std::vector<uint64_t> peak_live;
  /// Peak elements of these activations, per device; 0 if they were not
  /// measured.
  std::vector<double> peak_activations;
  /// Peak number of microbatches between start and end.
  uint64_t peak_active = 0;
  /// Sorted by begin; works that take no time are omitted.
  std::vector<timeline_entry> timeline;
};

struct check_options {
  uint64_t microbatches = 1;
  /// Refuses schedules that keep more microbatches alive.
  uint64_t active = std::numeric_limits<uint64_t>::max();
  /// By device; `backward_first` if empty.
  std::vector<service_order> orders = {};
  bool timeline = false;
  /// If not 0, each hop takes between 0.5 and 1.5 times its nominal time, drawn
  /// at random. So of two messages that arrive at about the same time, the
  /// first one differs between seeds, as it does between real steps.
  uint64_t seed = 0;
};

/// A schedule that starts a phase twice, turns around too early or waits for an
/// event that never comes would hang or ruin a step that may run on a thousand
/// ranks. So it is simulated first, on the work of one microbatch, with one
/// token per device as in a real step.
/// @param x a fresh instance; it is used up afterwards
/// @throws error (config) naming the first invalid task, or the remaining ones
///         if the schedule waits although nothing is in flight; and whatever
///         `x` throws.
schedule_report check_schedule(const pipeline_program& program, schedule& x,
                               const check_options& options);

} // namespace smp
