#pragma once

// What the kernel of this machine knows about a process.

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// How a process ended.
struct process_end {
  /// Exit code, or 128 + signal.
  int code = 0;
  /// 0 unless a signal killed it.
  int signal = 0;

  /// @returns "exited with code 7", "killed by signal 9 (SIGKILL)"
  std::string describe() const;
};

/// @param status as waitpid(2) gives it
process_end end_of_status(int status) noexcept;

struct process_state {
  /// As in proc(5): 'R' running, 'S' sleeping, 'T' stopped, 't' traced.
  char letter = '?';
  /// It is on its way out: others may find its connections closed, but its end
  /// cannot be asked for yet.
  bool exiting = false;
  /// In clock ticks since boot: tells a process from a later one that has the
  /// same number.
  uint64_t start_time = 0;
  /// How it ended, if it did. Code 0 also where the kernel does not tell.
  process_end end;

  /// A zombie, kept only until its parent asks for its status.
  bool ended() const noexcept {
    return letter == 'Z' || letter == 'X';
  }

  bool stopped() const noexcept {
    return letter == 'T' || letter == 't';
  }
};

/// @returns nothing if there is no such process
std::optional<process_state> state_of_process(int64_t pid);

/// In bytes; the resident set.
struct process_memory {
  uint64_t now = 0;
  uint64_t peak = 0;
};

process_memory memory_of_this_process();

/// @returns the name of this machine
std::string host_name();

} // namespace smp
