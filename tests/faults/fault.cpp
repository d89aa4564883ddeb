#include "runtime/base/fault.hpp"

#include "runtime/session/session.hpp"

#include <cstdlib>
#include <string>

namespace smp {

bool fault_is_seeded(const char* name) noexcept {
  static const auto* const wanted = std::getenv("SMP_FAULT");
  return wanted != nullptr && std::string{"smp-fault "} + wanted == name
         && session::current_or_null() != nullptr;
}

} // namespace smp
