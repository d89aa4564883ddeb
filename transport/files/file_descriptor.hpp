#pragma once

#include <utility>

#include <unistd.h>

namespace smp {

/// Owns a file descriptor and closes it at its end.
class file_descriptor {
public:
  file_descriptor() noexcept = default;

  /// @param fd -1, as a failed system call returns it: none
  explicit file_descriptor(int fd) noexcept : fd_(fd) {
    // nop
  }

  file_descriptor(file_descriptor&& x) noexcept : fd_(x.release()) {
    // nop
  }

  file_descriptor& operator=(file_descriptor&& x) noexcept {
    reset(x.release());
    return *this;
  }

  ~file_descriptor() {
    reset();
  }

  int get() const noexcept {
    return fd_;
  }

  explicit operator bool() const noexcept {
    return fd_ >= 0;
  }

  /// Gives it up without closing it. @returns -1 if there was none
  int release() noexcept {
    return std::exchange(fd_, -1);
  }

  /// Closes the current descriptor, if there is one, and takes `fd`.
  void reset(int fd = -1) noexcept {
    if (auto old = std::exchange(fd_, fd); old >= 0)
      ::close(old);
  }

private:
  int fd_ = -1;
};

} // namespace smp
