#pragma once

// Threads that must not wait.

namespace smp {

/// Others need the calling thread to go on, so from now on it never waits: what
/// is not done yet when somebody waits for it there is an error (unsupported)
/// that names it and the thread, unless the thread has a waiter of its own.
/// @param thread what it is, for the error; lives for ever
void refuse_waits(const char* thread) noexcept;

} // namespace smp
