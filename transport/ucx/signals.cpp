#include "transport/ucx/signals.hpp"

#include <csignal>

#include <dlfcn.h>
#include <ucs/debug/debug.h>

namespace smp {

namespace {

/// Tells whether the code at `x` is in the library that has `other`.
bool same_library(const void* x, const void* other) {
  Dl_info of_x{}, of_other{};
  return ::dladdr(x, &of_x) != 0 && ::dladdr(other, &of_other) != 0
         && of_x.dli_fbase == of_other.dli_fbase;
}

} // namespace

void restore_hangup() {
  // The program may have its own handler, and UCX complains without one.
  struct sigaction now {};
  if (::sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler != SIG_DFL
      && now.sa_handler != SIG_IGN
      && same_library(reinterpret_cast<const void*>(now.sa_handler),
                      reinterpret_cast<const void*>(&ucs_debug_disable_signal)))
    ucs_debug_disable_signal(SIGHUP);
}

} // namespace smp
