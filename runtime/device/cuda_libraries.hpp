#pragma once

#include <string>

namespace smp {

/// Whether this process can compute on the device "cuda".
struct cuda_libraries {
  bool usable = false;
  /// Why not, for people.
  std::string why_not;
  /// Whether a user would wonder: there is an NVIDIA driver, or SMP_CUDA = 1
  /// says that there is.
  bool expected = false;
};

/// Loads LibTorch's part for GPUs, which lies beside libtorch_cpu, and
/// libsmp_cuda, if this machine has a driver and GPUs for them; 0.4 s and 240
/// MB. The first call of LibTorch decides for the whole process whether it has
/// CUDA, so this must come before it. SMP_CUDA = 0 in the environment: never;
/// 1: whatever the driver says. Later calls return what the first one did.
/// Thread-safe.
const cuda_libraries& load_cuda();

} // namespace smp
