#include "transport/wake_up.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace smp {

namespace {

// A notification that is near costs half a microsecond to a thread that polls
// for it and up to fifty to one that sleeps. One that is far costs a
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

// -- pollable -----------------------------------------------------------------

pollable_wake_up::pollable_wake_up()
  : event_(::eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!event_)
    throw std::system_error{errno, std::generic_category(),
                            "no event descriptor"};
}

void pollable_wake_up::notify() noexcept {
  // Not `eventfd_write`, which ThreadSanitizer does not intercept. Fails only
  // after 2^64 notifications that no thread consumed.
  uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(event_.get(), &one, sizeof one);
}

bool pollable_wake_up::is_notified() const noexcept {
  pollfd ready{event_.get(), POLLIN, 0};
  return ::poll(&ready, 1, 0) > 0;
}

bool pollable_wake_up::try_wait() noexcept {
  uint64_t one = 0;
  return ::read(event_.get(), &one, sizeof one) == sizeof one;
}

void pollable_wake_up::wait() noexcept {
  while (!try_wait()) {
    pollfd ready{event_.get(), POLLIN, 0};
    ::poll(&ready, 1, -1);
  }
}

} // namespace smp
