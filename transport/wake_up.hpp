#pragma once

#include <semaphore.h>

namespace smp {

/// Wakes one thread that parks until there is something to do for it. Counts:
/// every `notify` ends one `wait`, also one that begins later.
///
/// A POSIX semaphore and not `std::counting_semaphore`: that of GCC 12 can
/// sleep for ever when two releases meet one acquire (libstdc++ bug 104928).
/// Whoever returned from `wait` may destroy it, even if the `notify` that woke
/// it has not returned yet.
class wake_up {
public:
  wake_up();
  ~wake_up();
  wake_up(const wake_up&) = delete;
  wake_up& operator=(const wake_up&) = delete;

  void notify() noexcept;

  /// Parks until there is a notification and consumes it.
  void wait() noexcept;

private:
  sem_t pending_;
};

} // namespace smp
