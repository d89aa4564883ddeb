#pragma once

#include "transport/inspect.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

struct stack_frame {
  /// Demangled; empty if the file of the library does not say, or was replaced
  /// since.
  std::string function;
  /// Path; empty if the address is in no file, as code that was made at run
  /// time.
  std::string library;
  /// In the library's own addresses, as addr2line takes it; without a library,
  /// in memory. Of a call, within the instruction that calls.
  uint64_t offset = 0;

  bool operator==(const stack_frame&) const = default;
};

template <class Inspector>
bool inspect(Inspector& f, stack_frame& x) {
  return f.object(x).fields(f.field("function", x.function),
                            f.field("library", x.library),
                            f.field("offset", x.offset));
}

/// One thread, or several of the same name that are at the same place.
struct thread_stack {
  /// As the kernel numbers them.
  std::vector<uint64_t> ids;
  std::string name;
  /// "running", "sleeping"; before it was asked.
  std::string state;
  /// Of all of them, in user and system mode.
  double cpu_seconds = 0;
  /// Why there are no frames; empty if there are.
  std::string problem;
  /// Lines of an interpreter's stack, innermost first.
  std::vector<std::string> script;
  /// Innermost first.
  std::vector<stack_frame> frames;
  /// Whether there are more frames, which are further out.
  bool cut = false;
};

template <class Inspector>
bool inspect(Inspector& f, thread_stack& x) {
  return f.object(x).fields(
    f.field("ids", x.ids), f.field("name", x.name), f.field("state", x.state),
    f.field("cpu_seconds", x.cpu_seconds), f.field("problem", x.problem),
    f.field("script", x.script), f.field("frames", x.frames),
    f.field("cut", x.cut));
}

/// What the threads of a rank's process are doing.
struct process_stacks {
  rank_id rank;
  uint64_t pid = 0;
  std::string host;
  /// What could not be shown, and why; empty if all could.
  std::string problem;
  /// The main thread first.
  std::vector<thread_stack> threads;
};

template <class Inspector>
bool inspect(Inspector& f, process_stacks& x) {
  return f.object(x).fields(
    f.field("rank", x.rank), f.field("pid", x.pid), f.field("host", x.host),
    f.field("problem", x.problem), f.field("threads", x.threads));
}

/// Asks each thread of this process by a signal, so it needs no permission and
/// no lock that a stuck thread may hold. Takes at most 5 s, and milliseconds if
/// all threads answer.
process_stacks stacks_of_this_process();

} // namespace smp
