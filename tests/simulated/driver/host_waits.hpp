#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace smp::sim {

/// How often the host has waited for a device, whether or not there was
/// something to wait for.
struct host_wait_counts {
  uint64_t number = 0;
  /// What the last wait was for: "stream", "device", "event", "copy to host",
  /// "freeing memory" or the name of an operator whose launch waited.
  std::string last;
  std::map<std::string, uint64_t> by_name;
};

host_wait_counts host_waits();

void reset_host_waits();

/// For the driver and the backend: the host is about to wait.
void count_host_wait(const char* name);

} // namespace smp::sim
