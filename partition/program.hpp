#pragma once

// What one microbatch does on which device, in order.

#include "partition/partitioner.hpp"
#include "partition/schedule.hpp"

namespace smp {

/// One segment of work on one device, between two messages.
struct work {
  uint32_t device = 0;
  double forward = 0;     // seconds
  double backward = 0;    // seconds
  double activations = 0; // elements kept from forward to backward
  /// Microbatches enter in the order in which they were started, because a
  /// module changes state here (R19).
  bool ordered = false;
  /// The model chunk of its modules; if it has none, of the work before it.
  uint32_t chunk = 0;
  /// The code here waits for what the work before it returns, also where calls
  /// do not wait by themselves.
  bool waits = false;
};

/// As remote calls block, a microbatch is in one place at a time: its forward
/// phase is a chain of pieces of work, and its backward phase the same chain in
/// reverse.
struct pipeline_program {
  uint32_t devices = 1;
  uint32_t chunks = 1;
  /// Neighbours are on different devices; the first is on device 0.
  std::vector<work> chain;
  /// From the end of a work to the arrival on the next device.
  double hop_seconds = 0;
};

/// Times that a model does not know itself.
struct program_times {
  double step_seconds = 1;   // a microbatch on one device, both phases
  double backward_ratio = 2; // backward time over forward time
  double hop_seconds = 0;
};

/// Follows the calls of the model in execution order. The own time of a module
/// (its share of all compute costs) comes before the calls of its children;
/// after each remote call control returns to the caller, except between calls
/// that are one request (R8).
pipeline_program make_program(const model_info& model,
                              const partition_plan& plan,
                              const program_times& times);

/// @returns what a service order on `device` wants to know.
service_place place_of(const pipeline_program& x, uint32_t device,
                       uint64_t microbatches);

} // namespace smp
