#pragma once

#include <cstdint>
#include <string>

namespace smp {

/// The statistics of a session's last step.
struct step_stats {
  double seconds = 0;
  /// Time that this rank spent executing, in seconds.
  double executing_seconds = 0;
  uint64_t requests = 0;   // sent by this rank
  uint64_t bytes_sent = 0; // sent by this rank
  /// Bytes that this rank wrote to a file, and seconds it waited for the file
  /// (`smp.offload_activations`).
  uint64_t offloaded_bytes = 0;
  double offload_wait_seconds = 0;
  /// Number of times that an execution of this rank waited for a reply.
  uint64_t waits = 0;
  /// The step replayed a record to its end (`smp.static_mode`).
  bool replayed = false;
  /// The step diverged from its record and ran without it.
  bool fell_back = false;
  /// How the step failed, if it was then rolled back and run once more with all
  /// calls waiting (`smp.fast_mode = "auto"`). Else empty. All figures then
  /// cover both runs.
  std::string ran_again = {};
};

} // namespace smp
