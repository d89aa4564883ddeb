#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// What NVIDIA's driver says of this machine.
struct cuda_driver {
  struct gpu {
    std::string name;
    uint64_t memory = 0; // bytes
  };

  /// The newest CUDA that it can run, 1000 * major + 10 * minor; 0: there is
  /// no driver.
  int version = 0;
  /// Those that this process may use (CUDA_VISIBLE_DEVICES).
  std::vector<gpu> gpus;
  /// Why none of them can be used, for people; empty: they can.
  std::string problem;
};

/// The CUDA that LibTorch was built for; a driver must be as new.
inline constexpr int needed_cuda_version = 13000;

/// Asks in a process of its own: a driver may hang, and one that was asked here
/// could not be used by processes that this one forks. Loads nothing here. With
/// SMP_CUDA = 0 in the environment it is not asked.
/// @param limit the answer after this is that it hangs
cuda_driver
ask_cuda_driver(std::chrono::milliseconds limit = std::chrono::seconds{30});

} // namespace smp
