// A thread writes down its own stack, in the handler of a signal. All of this
// belongs to the process, as signals do: so it is static.

#include "transport/stacks/stack_signal.hpp"

#include "transport/files/file_descriptor.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <optional>
#include <utility>

#include <dlfcn.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

namespace smp {

namespace {

/// Frames of one thread.
constexpr size_t frame_limit = 256;
/// Of an interpreter, in bytes.
constexpr size_t script_limit = size_t{64} << 10;

/// The place for one answer. `turn` is the thread that is asked, and how far it
/// is: a thread that answers late must not write into the turn of another.
struct answer_slot {
  static constexpr uint64_t asked = 1;
  static constexpr uint64_t writing = 2;
  static constexpr uint64_t written = 3;

  static uint64_t of(pid_t thread, uint64_t progress) {
    return static_cast<uint64_t>(thread) << 2 | progress;
  }

  std::atomic<uint64_t> turn = 0;
  int script_signal = 0; // 0: there is no interpreter
  bool interrupted = false;
  bool cut = false;
  sigjmp_buf escape{};
  size_t size = 0;
  std::array<uintptr_t, frame_limit> frames{};
  sem_t answered{};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

answer_slot the_slot;
std::optional<script_probe> the_probe;
std::string the_probe_problem;

pid_t this_thread() noexcept {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

/// @returns whether the thread is in the unwinder itself, as it throws an
/// exception: on the way to who catches it, no table tells what its caller is
bool is_in_unwinder(uintptr_t address) {
  auto start_of = [](void* x) -> void* {
    dl_find_object object{};
    return ::_dl_find_object(x, &object) == 0 ? object.dlfo_map_start : nullptr;
  };
  return start_of(reinterpret_cast<void*>(address))
         == start_of(reinterpret_cast<void*>(_Unwind_Backtrace));
}

_Unwind_Reason_Code write_frame(_Unwind_Context* x, void* to) {
  auto& slot = *static_cast<answer_slot*>(to);
  int interrupted = 0; // else this is where a call returns to
  auto address = _Unwind_GetIPInfo(x, &interrupted);
  if (address == 0)
    return _URC_END_OF_STACK;
  if (interrupted != 0 && !slot.interrupted) {
    slot.interrupted = true;
    slot.size = 0; // what came before is the handler
  }
  if (slot.size == frame_limit) {
    slot.cut = true;
    return _URC_END_OF_STACK;
  }
  slot.frames[slot.size++] = interrupted != 0 ? address : address - 1;
  slot.cut = interrupted != 0 && is_in_unwinder(address);
  return slot.cut ? _URC_END_OF_STACK : _URC_NO_REASON;
}

/// Async-signal-safe: libgcc 12 and later find unwind tables without a lock,
/// unless code that was made at run time has registered its own.
void write_stack(int) {
  const auto saved = errno;
  auto& slot = the_slot;
  const auto me = this_thread();
  auto expected = answer_slot::of(me, answer_slot::asked);
  if (slot.turn.compare_exchange_strong(
        expected, answer_slot::of(me, answer_slot::writing))) {
    slot.size = 0;
    slot.interrupted = slot.cut = false;
    if (sigsetjmp(slot.escape, 1) == 0) {
      _Unwind_Backtrace(write_frame, &slot);
      // To this thread itself: its handler is done when this returns.
      if (slot.script_signal != 0)
        ::syscall(SYS_tgkill, ::getpid(), me, slot.script_signal);
    } else {
      slot.cut = true;
    }
    slot.turn = answer_slot::of(me, answer_slot::written);
    ::sem_post(&slot.answered);
  }
  errno = saved;
}

/// @returns whether a signal does what it does in every program
bool is_default(const struct sigaction& x) {
  return (x.sa_flags & SA_SIGINFO) == 0 && x.sa_handler == SIG_DFL;
}

bool is_ours(const struct sigaction& x) {
  return (x.sa_flags & SA_SIGINFO) == 0 && x.sa_handler == write_stack;
}

// Where tables are wrong, as of code in assembler, the unwinder may read what
// is no memory. That must not end a run that is well.

struct sigaction the_old_fault_handlers[2];
constexpr std::array fault_signals{SIGSEGV, SIGBUS};

void on_fault(int number, siginfo_t* info, void* context) {
  if (the_slot.turn == answer_slot::of(this_thread(), answer_slot::writing))
    siglongjmp(the_slot.escape, 1);
  // Not of this; so what would have been.
  auto& old = the_old_fault_handlers[number == SIGSEGV ? 0 : 1];
  if ((old.sa_flags & SA_SIGINFO) != 0) {
    old.sa_sigaction(number, info, context);
  } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
    ::sigaction(number, &old, nullptr); // and it faults again
    if (info->si_code <= 0)             // unless it was sent
      ::raise(number);
  } else {
    old.sa_handler(number);
  }
}

/// While a thread writes down its stack.
class fault_guard {
public:
  fault_guard() {
    struct sigaction mine {};
    mine.sa_sigaction = on_fault;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&mine.sa_mask);
    for (size_t i = 0; i < fault_signals.size(); ++i)
      ::sigaction(fault_signals[i], &mine, &the_old_fault_handlers[i]);
  }

  ~fault_guard() {
    for (size_t i = 0; i < fault_signals.size(); ++i) {
      struct sigaction now {};
      ::sigaction(fault_signals[i], nullptr, &now);
      if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault)
        ::sigaction(fault_signals[i], &the_old_fault_handlers[i], nullptr);
    }
  }

  fault_guard(const fault_guard&) = delete;
  fault_guard& operator=(const fault_guard&) = delete;
};

bool wait_for_answer(std::chrono::steady_clock::time_point deadline) {
  auto left = deadline.time_since_epoch();
  auto whole = std::chrono::floor<std::chrono::seconds>(left);
  timespec until{};
  until.tv_sec = whole.count();
  until.tv_nsec = std::chrono::nanoseconds{left - whole}.count();
  for (;;) {
    if (::sem_clockwait(&the_slot.answered, CLOCK_MONOTONIC, &until) == 0)
      return true;
    if (errno != EINTR)
      return false;
  }
}

std::string take_script() {
  std::string result(script_limit, '\0');
  auto got = ::pread(the_probe->file, result.data(), result.size(), 0);
  result.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return result;
}

/// @returns whether the file is empty
bool clear_script() {
  return ::ftruncate(the_probe->file, 0) == 0
         && ::lseek(the_probe->file, 0, SEEK_SET) == 0;
}

} // namespace

/// Programs and libraries count from SIGRTMIN up, debuggers from SIGRTMAX down.
int stack_signal() noexcept {
  return SIGRTMAX - 7;
}

std::string take_stack_signal() {
  struct sigaction now {};
  if (::sigaction(stack_signal(), nullptr, &now) != 0)
    return std::strerror(errno);
  if (is_ours(now))
    return {};
  if (!is_default(now))
    return "this program uses the signal by which smp asks threads, SIGRTMAX-7";
  ::sem_init(&the_slot.answered, 0, 0);
  // The first time, it prepares its tables.
  answer_slot unused;
  _Unwind_Backtrace(write_frame, &unused);
  struct sigaction mine {};
  mine.sa_handler = write_stack;
  mine.sa_flags = SA_RESTART | SA_ONSTACK;
  ::sigemptyset(&mine.sa_mask);
  if (::sigaction(stack_signal(), &mine, nullptr) != 0)
    return std::strerror(errno);
  return {};
}

std::optional<script_probe> open_script_probe() {
  if (the_probe)
    return the_probe;
  const auto number = SIGRTMAX - 6;
  struct sigaction now {};
  if (::sigaction(number, nullptr, &now) != 0 || !is_default(now)) {
    the_probe_problem = "no frames of Python: this program uses SIGRTMAX-6";
    return std::nullopt;
  }
  file_descriptor file{::memfd_create("smp.stack", MFD_CLOEXEC)};
  if (!file) {
    the_probe_problem = std::string{"no frames of Python: memfd_create: "}
                        + std::strerror(errno);
    return std::nullopt;
  }
  struct sigaction ignored {};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(number, &ignored, nullptr);
  the_probe = script_probe{number, file.release()};
  return the_probe;
}

std::string script_probe_problem() {
  return the_probe_problem;
}

const script_probe* script_probe_in_use() noexcept {
  struct sigaction now {};
  if (!the_probe || ::sigaction(the_probe->signal, nullptr, &now) != 0
      || is_default(now)
      || ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_IGN))
    return nullptr;
  return &*the_probe;
}

std::optional<raw_stack>
ask_thread(pid_t thread, bool script,
           std::chrono::steady_clock::time_point deadline) {
  raw_stack result;
  auto& slot = the_slot;
  if ((slot.turn & 3) == answer_slot::writing) {
    result.problem
      = "not asked: another thread has begun to answer and has "
        "had no time to end";
    return result;
  }
  while (::sem_trywait(&slot.answered) == 0) {
    // nop
  }
  auto* probe = script ? script_probe_in_use() : nullptr;
  slot.script_signal = probe != nullptr && clear_script() ? probe->signal : 0;
  fault_guard guard;
  slot.turn = answer_slot::of(thread, answer_slot::asked);
  if (::syscall(SYS_tgkill, ::getpid(), thread, stack_signal()) != 0) {
    const auto code = errno;
    slot.turn = 0;
    if (code == ESRCH)
      return std::nullopt;
    result.problem = std::strerror(code);
    return result;
  }
  if (!wait_for_answer(deadline)
      || slot.turn != answer_slot::of(thread, answer_slot::written)) {
    auto expected = answer_slot::of(thread, answer_slot::asked);
    slot.turn.compare_exchange_strong(expected, 0);
    result.problem = "did not answer";
    return result;
  }
  result.frames.assign(slot.frames.begin(), slot.frames.begin() + slot.size);
  result.cut = slot.cut;
  if (slot.script_signal != 0)
    result.script = take_script();
  return result;
}

} // namespace smp
