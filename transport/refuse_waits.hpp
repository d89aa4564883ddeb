#pragma once

// Threads that must not wait.

namespace smp {

/// Others need the calling thread to go on, so from now on it never waits: what
/// is not done yet when somebody waits for it there is an error (unsupported)
/// that names it and the thread, unless the thread has a waiter of its own.
/// @param thread what it is, for the error; lives for ever
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
