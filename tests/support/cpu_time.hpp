#pragma once

#include <ctime>

namespace smp::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)              \
  || !defined(NDEBUG)
inline constexpr double slow_build = 30;
#else
inline constexpr double slow_build = 1;
#endif

/// Seconds that this process computed; a busy machine does not change them.
inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

} // namespace smp::test
