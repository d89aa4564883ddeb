#pragma once

// Threads that must not wait.

namespace smp {

/// Others depend on the calling thread, so from now on it must not wait: a wait
/// on it for something that is not done yet throws error (unsupported), which
/// names both, unless the thread has a waiter of its own.
/// @param thread its description, for the error; lives forever
void refuse_waits(const char* thread) noexcept;

class waiter;

/// The same until the end of the scope, whatever waiter the thread has.
class refused_waits {
public:
  explicit refused_waits(const char* thread) noexcept;
  ~refused_waits();
  refused_waits(const refused_waits&) = delete;
  refused_waits& operator=(const refused_waits&) = delete;

private:
  waiter* waiter_;
  const char* thread_;
};

} // namespace smp
