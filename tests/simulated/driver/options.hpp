#pragma once

#include <cstddef>
#include <cstdint>

namespace smp::sim {

/// More devices than any test wants.
constexpr int max_devices = 8;

/// How the simulated devices behave.
struct options {
  /// At most `max_devices`; only before the first use of a device.
  int devices = 2;
  /// Bytes of memory of each device.
  size_t capacity = size_t{1} << 30;
  /// Of the delays.
  uint64_t seed = 0;
  /// A kernel begins up to as many microseconds late, or at once if 0.
  int delay_us = 0;
  /// Fresh and freed blocks, and pinned targets of pending copies, are filled
  /// with 0xFF (NaN, -1), so that who reads too early or too late sees it.
  bool poison = false;
  /// Look for accesses that nothing orders (races.hpp).
  bool check = false;
  /// No device reaches memory of another one, or of another process.
  bool no_peers = false;
  /// Every launch waits for its kernel, as with CUDA_LAUNCH_BLOCKING.
  bool always_sync = false;
  /// This kernel of the process, counted by launches from 1, makes its device
  /// fail (failures.hpp); 0: none does.
  uint64_t fail_kernel = 0;
};

/// Those in force; may be changed while the devices are idle. At first what the
/// environment says: SMP_SIM_DEVICES, SMP_SIM_CAPACITY (MB), SMP_SIM_DELAY_US,
/// SMP_SIM_SEED, SMP_SIM_POISON=1, SMP_SIM_CHECK=1, SMP_SIM_NO_PEERS=1,
/// SMP_SIM_FAIL_KERNEL.
///
/// A process with SMP_SIM_CHECK=1 in which the checker finds something prints
/// that when it exits, and exits with `exit_code_of_races`.
options& config();

constexpr int exit_code_of_races = 97;

/// Sets options and puts them back as they were at the end of the scope. Both
/// wait for the devices, which does not count as a wait of the host, and repair
/// those that have failed.
class changed_options {
public:
  explicit changed_options(const options& now);

  ~changed_options();

  changed_options(const changed_options&) = delete;

  changed_options& operator=(const changed_options&) = delete;

private:
  options before_;
};

} // namespace smp::sim
