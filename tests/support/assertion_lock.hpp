#pragma once

#include <mutex>

namespace smp::test {

/// Lets a thread other than that of the case assert, for example a rank of a
/// virtual world. Catch2 3.7 counts assertions without a lock: `main.cpp` ends
/// a program that asserts on another thread without one. What waits for other
/// ranks is computed before.
class assertion_lock {
public:
  assertion_lock() : guard_(mutex_) {
    held_ = true;
  }

  ~assertion_lock() {
    held_ = false;
  }

  assertion_lock(const assertion_lock&) = delete;
  assertion_lock& operator=(const assertion_lock&) = delete;

  static bool held() noexcept {
    return held_;
  }

private:
  static inline std::mutex mutex_;
  static inline thread_local bool held_ = false;

  std::unique_lock<std::mutex> guard_;
};

} // namespace smp::test
