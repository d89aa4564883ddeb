#include "tests/simulated/driver/options.hpp"

#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace smp::sim {

namespace {

/// @returns the number that the variable holds, or `otherwise` without one
uint64_t number_in(const char* variable, uint64_t otherwise) {
  const auto* text = std::getenv(variable);
  if (text == nullptr || *text == '\0')
    return otherwise;
  char* end = nullptr;
  auto number = std::strtoull(text, &end, 10);
  if (*end != '\0')
    throw std::runtime_error{std::string{"simulated device: "} + variable
                             + " is not a number: " + text};
  return number;
}

options options_of_environment() {
  options result;
  result.devices = static_cast<int>(number_in("SMP_SIM_DEVICES", 2));
  if (result.devices > max_devices)
    throw std::runtime_error{"simulated device: SMP_SIM_DEVICES is too large"};
  result.capacity = number_in("SMP_SIM_CAPACITY", 1024) << 20;
  result.seed = number_in("SMP_SIM_SEED", 0);
  result.delay_us = static_cast<int>(number_in("SMP_SIM_DELAY_US", 0));
  result.poison = number_in("SMP_SIM_POISON", 0) != 0;
  result.no_peers = number_in("SMP_SIM_NO_PEERS", 0) != 0;
  result.check = number_in("SMP_SIM_CHECK", 0) != 0;
  result.fail_kernel = number_in("SMP_SIM_FAIL_KERNEL", 0);
  return result;
}

} // namespace

options& config() {
  // Never destroyed: kernels look at it while the process ends.
  static auto* const current = new options{options_of_environment()};
  return *current;
}

changed_options::changed_options(const options& now) : before_(config()) {
  settle_all();
  repair_devices();
  config() = now;
}

changed_options::~changed_options() {
  settle_all();
  repair_devices();
  config() = before_;
}

} // namespace smp::sim
