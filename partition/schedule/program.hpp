#pragma once

// The work of one microbatch: which device does what, in order.

#include "partition/partitioner.hpp"
#include "partition/schedule/schedule.hpp"

namespace smp {

/// One segment of work on one device, from one message to the next.
struct work {
  uint32_t device = 0;
  double forward = 0;     // seconds
  double backward = 0;    // seconds
  double activations = 0; // elements kept from forward to backward
  /// Microbatches enter in the order in which they were started, because a
  /// module in this segment changes state (R19).
  bool ordered = false;
  /// The model chunk of its modules; without any, that of the work before it.
  uint32_t chunk = 0;
  /// The code in this segment waits for the results of the work before it, even
  /// if calls do not wait by themselves.
  bool waits = false;
};

/// As remote calls block, a microbatch is in one place at a time: its forward
/// phase is a chain of works, and its backward phase the same chain in
/// reverse.
struct pipeline_program {
  uint32_t devices = 1;
  uint32_t chunks = 1;
  /// Adjacent works are on different devices; the first is on device 0.
  std::vector<work> chain;
  /// Time from the end of a work to the arrival on the next device.
  double hop_seconds = 0;
};

/// Times that the model itself does not contain.
struct program_times {
  double step_seconds = 1;   // a microbatch on one device, both phases
  double backward_ratio = 2; // backward time over forward time
  double hop_seconds = 0;
};

/// Follows the calls of the model in execution order. The own time of a module
/// (its share of all compute costs) comes before the calls of its children.
/// After each remote call control returns to the caller, except between calls
/// that are one request (R8).
pipeline_program make_program(const model_info& model,
                              const partition_plan& plan,
                              const program_times& times);

/// @returns the input of a service order on `device`.
service_place place_of(const pipeline_program& x, uint32_t device,
                       uint64_t microbatches);

} // namespace smp
