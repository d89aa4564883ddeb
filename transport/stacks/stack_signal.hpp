#pragma once

#include "transport/stacks/script_probe.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace smp {

/// Where a thread is.
struct raw_stack {
  /// Innermost first: that of the next instruction, then of each call.
  std::vector<uintptr_t> frames;
  bool cut = false;
  /// What the interpreter wrote.
  std::string script;
  /// Why there are no frames.
  std::string problem;
};

/// Number of the signal that asks a thread.
int stack_signal() noexcept;

/// Takes the signal. @returns why not; empty if it did
std::string take_stack_signal();

/// The probe, if an interpreter has set a handler for it.
const script_probe* script_probe_in_use() noexcept;

/// Asks one thread of this process; one at a time. Call it after
/// `take_stack_signal`.
/// @param script whether to ask the interpreter, too
/// @returns nothing if it has ended
std::optional<raw_stack>
ask_thread(pid_t thread, bool script,
           std::chrono::steady_clock::time_point deadline);

} // namespace smp
