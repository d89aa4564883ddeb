#pragma once

// Private writable memory, and limits on it (RLIMIT_DATA).

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

#include <sys/resource.h>

namespace smp::test {

inline constexpr int64_t mb = 1 << 20;

/// Private writable memory of this process, as the kernel counts it.
inline int64_t private_bytes() {
  std::ifstream in{"/proc/self/status"};
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("VmData:"))
      return 1024 * std::stoll(line.substr(7));
  throw std::runtime_error{"no VmData in /proc/self/status"};
}

/// The kernel refuses this process more memory, from now on and for ever.
inline void limit_private_bytes(int64_t most) {
  const rlimit limit{static_cast<rlim_t>(most), static_cast<rlim_t>(most)};
  if (::setrlimit(RLIMIT_DATA, &limit) != 0)
    throw std::runtime_error{"setrlimit failed"};
}

/// Whether a log says that memory ran out: LibTorch, the standard library, UCX
/// or smp, whoever asked for the last of it.
inline bool tells_of_no_memory(const std::string& log) {
  for (auto text : {"DefaultCPUAllocator", "bad_alloc", "Out of memory",
                    "no memory for what it sends"})
    if (log.find(text) != std::string::npos)
      return true;
  return false;
}

} // namespace smp::test
