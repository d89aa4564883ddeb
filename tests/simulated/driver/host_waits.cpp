#include "tests/simulated/driver/host_waits.hpp"

#include <mutex>

namespace smp::sim {

namespace {

struct counted_waits {
  std::mutex mutex;
  host_wait_counts counts;
};

counted_waits& waits() {
  static auto* const only = new counted_waits;
  return *only;
}

} // namespace

host_wait_counts host_waits() {
  std::lock_guard guard{waits().mutex};
  return waits().counts;
}

void reset_host_waits() {
  std::lock_guard guard{waits().mutex};
  waits().counts = {};
}

void count_host_wait(const char* name) {
  std::lock_guard guard{waits().mutex};
  auto& counts = waits().counts;
  ++counts.number;
  ++counts.by_name[name];
  counts.last = name;
}

} // namespace smp::sim
