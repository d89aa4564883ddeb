#include "runtime/base/fault.hpp"

#include "runtime/session/session.hpp"

#include <cstdlib>
#include <cstring>

namespace smp {

// The environment selects the fault (SMP_FAULT=NAME). A thread without a
// session is never at fault: a lone process is what others are compared with.
bool fault_is_seeded(const char* name) noexcept {
  static const auto* const wanted = std::getenv("SMP_FAULT");
  return wanted != nullptr && std::strcmp(wanted, name) == 0
         && session::current_or_null() != nullptr;
}

} // namespace smp
