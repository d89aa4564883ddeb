#pragma once

#include "transport/files/file_descriptor.hpp"

#include <semaphore.h>

namespace smp {

/// Wakes one thread that parks until there is something to do for it. Counts:
/// every `notify` ends one `wait`, also one that begins later.
///
/// A POSIX semaphore and not `std::counting_semaphore`: that of GCC 12 can
/// sleep forever when two releases meet one acquire (libstdc++ bug 104928). A
/// thread that has returned from `wait` may destroy it, even if the `notify`
/// that woke it has not returned yet.
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

/// A `wake_up` that can be waited for together with other descriptors. A
/// notification costs half a microsecond more.
class pollable_wake_up {
public:
  /// @throws std::system_error where the process has no descriptor left
  pollable_wake_up();

  void notify() noexcept;

  bool is_notified() const noexcept;

  /// Consumes a notification. @returns false if there is none
  bool try_wait() noexcept;

  /// Parks until there is a notification and consumes it.
  void wait() noexcept;

  /// @returns a descriptor that is readable while there is a notification.
  int fd() const noexcept {
    return event_.get();
  }

private:
  file_descriptor event_;
};

} // namespace smp
