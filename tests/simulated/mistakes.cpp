#include "tests/simulated/mistakes.hpp"

#include "runtime/base/fault.hpp"

#include <atomic>
#include <cstring>

namespace smp {

namespace {

std::atomic<const char*> mistake = nullptr;

} // namespace

void sim::seed_mistake(const char* name) noexcept {
  mistake = name;
}

bool fault_is_seeded(const char* name) noexcept {
  auto* wanted = mistake.load();
  return wanted != nullptr && std::strcmp(wanted, name) == 0;
}

} // namespace smp
