#pragma once

#include <cstdint>
#include <string>

namespace smp {

/// What a session counted in its last step.
struct step_stats {
  double seconds = 0;
  /// Time in which this rank executed, in seconds.
  double executing_seconds = 0;
  uint64_t requests = 0;   // sent by this rank
  uint64_t bytes_sent = 0; // sent by this rank
  /// Bytes that this rank wrote to a file, and seconds that it waited for it
  /// (`smp.offload_activations`).
  uint64_t offloaded_bytes = 0;
  double offload_wait_seconds = 0;
  /// Times that an execution of this rank waited for another one's answer.
  uint64_t waits = 0;
  /// The step replayed a record to its end (`smp.static_mode`).
  bool replayed = false;
  /// The step diverged from its record and ran without
  /// (`smp.static_fallback = "dynamic"`).
  bool fell_back = false;
  /// The step failed, was taken back, and ran once more with all calls waiting
  /// (`smp.fast_mode = "auto"`): how it failed. Else empty. All figures are
  /// those of both runs.
  std::string ran_again = {};
};

} // namespace smp
