#pragma once

#include <ctime>

#include <sys/resource.h>

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

/// The same for processes that this one started and waited for.
inline double children_cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  auto seconds = [](const timeval& x) {
    return static_cast<double>(x.tv_sec)
           + 1e-6 * static_cast<double>(x.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

} // namespace smp::test
