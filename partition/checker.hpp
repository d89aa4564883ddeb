#pragma once

// Plays a schedule before it runs (R32).

#include "partition/program.hpp"
#include "partition/schedule.hpp"

namespace smp {

/// One piece of work while it held the token of its device.
struct timeline_entry {
  uint32_t device = 0;
  task what;
  double begin = 0; // seconds
  double end = 0;
};

/// What a step will be like.
struct schedule_report {
  double makespan = 0; // seconds
  /// 1 - executing time / (devices x makespan)
  double bubble = 0;
  std::vector<double> busy; // seconds, per device
  /// Microbatches whose activations are kept, at most, per device.
  std::vector<uint64_t> peak_live;
  /// Elements of these activations, at most, per device; 0 where nobody
  /// measured them.
  std::vector<double> peak_activations;
  /// Microbatches between start and end, at most.
  uint64_t peak_active = 0;
  /// By begin; works that take no time are left out.
  std::vector<timeline_entry> timeline;
};

struct check_options {
  uint64_t microbatches = 1;
  /// Refuse schedules that keep more microbatches alive.
  uint64_t active = std::numeric_limits<uint64_t>::max();
  /// By device; `backward_first` if empty.
  std::vector<service_order> orders = {};
  bool timeline = false;
  /// Not 0: a hop takes between a half and one and a half of its time, drawn
  /// anew each time. So who comes first, of two that come at about the same
  /// time, differs between seeds, as it does between steps.
  uint64_t seed = 0;
};

/// A schedule that asks for a phase twice, turns around too early or waits for
/// what never comes would hang or ruin a step that may run on a thousand
/// ranks. So it is played first, on the work of one microbatch, with one token
/// per device as in a real step.
/// @param x a fresh instance; it has ended afterwards
/// @throws error (config) naming the first offending task, or what is left if
///         the schedule waits although nothing is in flight; whatever `x`
///         throws.
schedule_report check_schedule(const pipeline_program& program, schedule& x,
                               const check_options& options);

} // namespace smp
