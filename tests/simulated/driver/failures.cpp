#include "tests/simulated/driver/failures.hpp"

#include "tests/simulated/driver/options.hpp"

#include <array>
#include <atomic>
#include <cstddef>

namespace smp::sim {

namespace {

std::array<std::atomic<bool>, max_devices> failed{};

} // namespace

void fail_device(int device) {
  failed.at(static_cast<size_t>(device)) = true;
}

bool has_failed(int device) {
  return failed.at(static_cast<size_t>(device));
}

void repair_devices() {
  for (auto& x : failed)
    x = false;
}

} // namespace smp::sim
