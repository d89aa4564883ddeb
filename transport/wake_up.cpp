#include "transport/wake_up.hpp"

#include <sched.h>

#include <cerrno>

namespace smp {

namespace {

// A notification that is near costs half a microsecond to somebody who looks
// for it and up to fifty to somebody who sleeps. One that is far costs a
// microsecond more, and a thread that has nothing to run yields its core.
constexpr int looks_before_yield = 12;
constexpr int looks_before_sleep = 16;

void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

} // namespace

wake_up::wake_up() {
  sem_init(&pending_, 0, 0);
}

wake_up::~wake_up() {
  sem_destroy(&pending_);
}

void wake_up::notify() noexcept {
  sem_post(&pending_);
}

void wake_up::wait() noexcept {
  for (int look = 0; look < looks_before_sleep; ++look) {
    if (sem_trywait(&pending_) == 0)
      return;
    if (look < looks_before_yield)
      pause();
    else
      sched_yield();
  }
  while (sem_wait(&pending_) != 0 && errno == EINTR)
    ; // interrupted by a signal
}

} // namespace smp
