#include "tests/support/catch.hpp"

#include "transport/bytes.hpp"
#include "transport/stacks/process_stacks.hpp"
#include "transport/stacks/stack_signal.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <latch>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;

#if defined(__SANITIZE_THREAD__)

TEST_CASE("ThreadSanitizer holds signals back, so no thread is asked",
          "[transport][stacks]") {
  CHECK(take_stack_signal().empty());
}

#else

namespace process_stacks_test {

struct gate {
  std::mutex mutex;
  std::condition_variable opened;
  std::atomic<bool> open = false;
  int waiting = 0;

  /// Until so many wait, and hold the mutex no more.
  void wait_for(int x) {
    for (;;)
      if (std::unique_lock guard{mutex}; waiting == x)
        return;
  }

  void open_now() {
    std::unique_lock guard{mutex};
    open = true;
    opened.notify_all();
  }
};

[[gnu::noinline]] bool wait_at_gate(gate& x) {
  std::unique_lock guard{x.mutex};
  ++x.waiting;
  x.opened.wait(guard, [&] { return x.open.load(); });
  return x.open; // not a tail call
}

[[gnu::noinline]] uint64_t turn_in_circles(const std::atomic<bool>& done) {
  uint64_t turns = 0;
  while (!done)
    ++turns;
  return turns;
}

[[gnu::noinline]] int throw_from(int depth) {
  if (depth == 0)
    throw std::runtime_error{"on purpose"};
  return throw_from(depth - 1) + 1;
}

} // namespace process_stacks_test

using namespace process_stacks_test;

namespace {

/// Lets helpers end, also if a test fails.
struct open_at_end {
  gate& x;

  ~open_at_end() {
    x.open_now();
  }
};

pid_t thread_id() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

/// A named thread that has begun, and its end.
class helper {
public:
  template <class F>
  helper(const char* name, F f)
    : thread_([this, name, f] {
        ::pthread_setname_np(::pthread_self(), name);
        id_ = thread_id();
        begun_.count_down();
        f();
      }) {
    begun_.wait();
  }

  ~helper() {
    thread_.join();
  }

  pid_t id() const {
    return id_;
  }

  /// Waits until it sleeps in the kernel, where it stays.
  void wait_until_asleep() const {
    auto status = "/proc/self/task/" + std::to_string(id_) + "/stat";
    for (std::string text; text.find(") S ") == std::string::npos;)
      std::getline(std::ifstream{status}, text);
  }

private:
  pid_t id_ = 0;
  std::latch begun_{1};
  std::thread thread_;
};

const thread_stack* named(const process_stacks& x, const std::string& name) {
  auto i = std::ranges::find(x.threads, name, &thread_stack::name);
  return i == x.threads.end() ? nullptr : &*i;
}

bool is_in(const thread_stack& x, const std::string& function) {
  return std::ranges::any_of(x.frames, [&](auto& y) {
    return y.function.find(function) != std::string::npos;
  });
}

} // namespace

TEST_CASE("Each thread tells where it is, and equal ones are told once",
          "[transport][stacks]") {
  gate closed;
  {
    auto wait = [&] { wait_at_gate(closed); };
    helper first{"waits", wait};
    helper second{"waits", wait};
    helper other{"also waits", wait};
    helper busy{"turns", [&] { turn_in_circles(closed.open); }};
    open_at_end end{closed};
    closed.wait_for(3);
    for (auto* x : {&first, &second, &other})
      x->wait_until_asleep();
    auto x = stacks_of_this_process();
    CHECK(x.problem.empty());
    CHECK(x.pid == static_cast<uint64_t>(::getpid()));
    REQUIRE(x.threads.size() > 3);
    CHECK(x.threads.front().ids.front() == x.pid);
    CHECK(is_in(x.threads.front(), "stacks_of_this_process"));
    CHECK(is_in(x.threads.front(), "main"));
    auto* waiting = named(x, "waits");
    REQUIRE(waiting != nullptr);
    CHECK(waiting->ids.size() == 2);
    CHECK(waiting->state == "sleeping");
    CHECK(is_in(*waiting, "process_stacks_test::wait_at_gate"));
    // From the frame that is interrupted, not from the handler.
    CHECK_FALSE(is_in(*waiting, "write_stack"));
    CHECK(waiting->frames.front().library.find("libc") != std::string::npos);
    auto* alike = named(x, "also waits");
    REQUIRE(alike != nullptr);
    CHECK(alike->frames == waiting->frames);
    auto* turning = named(x, "turns");
    REQUIRE(turning != nullptr);
    CHECK(is_in(*turning, "process_stacks_test::turn_in_circles"));
    // What crosses processes is read as it was written.
    byte_writer out;
    out.put(x);
    auto bytes = out.take();
    byte_reader in{bytes, "stacks"};
    auto same = in.get<process_stacks>();
    in.expect_end();
    CHECK(same.threads.size() == x.threads.size());
    CHECK(named(same, "waits")->frames == waiting->frames);
  }
}

TEST_CASE("A thread that blocks signals is said to, and asked for nothing",
          "[transport][stacks]") {
  gate closed;
  bool was_asked = true;
  {
    helper deaf{"deaf", [&] {
                  sigset_t all;
                  ::sigfillset(&all);
                  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
                  wait_at_gate(closed);
                  sigset_t pending;
                  ::sigpending(&pending);
                  was_asked = ::sigismember(&pending, stack_signal()) != 0;
                }};
    open_at_end end{closed};
    closed.wait_for(1);
    deaf.wait_until_asleep();
    auto x = stacks_of_this_process();
    auto* thread = named(x, "deaf");
    REQUIRE(thread != nullptr);
    CHECK(thread->frames.empty());
    CHECK(thread->problem.starts_with("it blocks signals"));
  }
  CHECK_FALSE(was_asked);
}

TEST_CASE("A thread that answers late does not answer for another one",
          "[transport][stacks]") {
  gate closed;
  std::atomic<bool> is_deaf = false;
  std::atomic<bool> lets = false;
  std::atomic<bool> has_let = false;
  {
    helper late{"late", [&] {
                  sigset_t one, old;
                  ::sigemptyset(&one);
                  ::sigaddset(&one, stack_signal());
                  ::pthread_sigmask(SIG_BLOCK, &one, &old);
                  is_deaf = true;
                  turn_in_circles(lets);
                  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
                  has_let = true;
                }};
    helper waiting{"waits", [&] { wait_at_gate(closed); }};
    open_at_end end{closed};
    closed.wait_for(1);
    waiting.wait_until_asleep();
    REQUIRE(take_stack_signal().empty());
    while (!is_deaf) {
      // It soon is.
    }
    auto x = ask_thread(late.id(), false,
                        std::chrono::steady_clock::now()
                          + std::chrono::milliseconds{1});
    lets = true;
    REQUIRE(x);
    CHECK(x->problem == "did not answer");
    CHECK(x->frames.empty());
    while (!has_let) {
      // Its signals arrive now.
    }
    auto y = ask_thread(waiting.id(), false,
                        std::chrono::steady_clock::now()
                          + std::chrono::seconds{10});
    REQUIRE(y);
    CHECK(y->problem.empty());
    CHECK(y->frames.size() > 2);
  }
}

TEST_CASE("A system call goes on after its thread was asked",
          "[transport][stacks]") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  ssize_t got = 0;
  {
    helper reader{"reads", [&] {
                    char x = 0;
                    got = ::read(ends[0], &x, 1);
                  }};
    for (int i = 0; i < 20; ++i) {
      reader.wait_until_asleep();
      auto x = stacks_of_this_process();
      auto* thread = named(x, "reads");
      REQUIRE(thread != nullptr);
      CHECK(is_in(*thread, "read"));
    }
    REQUIRE(::write(ends[1], "x", 1) == 1);
  }
  CHECK(got == 1);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("The frames of an interpreter come from its own handler",
          "[transport][stacks]") {
  auto probe = open_script_probe();
  REQUIRE(probe);
  CHECK(script_probe_in_use() == nullptr); // it is ignored
  static int file;
  file = probe->file;
  // Writes as faulthandler does.
  struct sigaction writes {};
  writes.sa_handler = [](int) {
    constexpr std::string_view text
      = "Stack (most recent call first):\n"
        "  File \"x.py\", line 3 in f\n";
    if (::write(file, text.data(), text.size()) < 0)
      std::abort();
  };
  REQUIRE(::sigaction(probe->signal, &writes, nullptr) == 0);
  for (int i = 0; i < 2; ++i) {
    auto x = stacks_of_this_process();
    CHECK(x.threads.front().script
          == std::vector<std::string>{"File \"x.py\", line 3 in f"});
  }
  // A fault in it, or in the unwinder, is not one of the program.
  struct sigaction faults {};
  faults.sa_handler = [](int) { ::raise(SIGSEGV); };
  REQUIRE(::sigaction(probe->signal, &faults, nullptr) == 0);
  struct sigaction before {};
  ::sigaction(SIGSEGV, nullptr, &before);
  auto cut = stacks_of_this_process();
  CHECK(cut.threads.front().cut);
  CHECK(is_in(cut.threads.front(), "stacks_of_this_process"));
  struct sigaction after {};
  ::sigaction(SIGSEGV, nullptr, &after);
  CHECK(after.sa_sigaction == before.sa_sigaction);
  // As Python leaves it at its end.
  struct sigaction ignored {};
  ignored.sa_handler = SIG_IGN;
  REQUIRE(::sigaction(probe->signal, &ignored, nullptr) == 0);
  CHECK(stacks_of_this_process().threads.front().script.empty());
}

TEST_CASE("A thread that throws is asked in the middle of it",
          "[transport][stacks]") {
  gate closed;
  helper throws{"throws", [&] {
                  while (!closed.open)
                    try {
                      throw_from(10);
                    } catch (const std::runtime_error&) {
                      // again
                    }
                }};
  open_at_end end{closed};
  int seen = 0;
  // A busy machine may run the thread rarely.
  auto until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  for (int i = 0;
       i < 200 || (seen == 0 && std::chrono::steady_clock::now() < until);
       ++i) {
    auto x = stacks_of_this_process();
    auto* thread = named(x, "throws");
    REQUIRE(thread != nullptr);
    seen += is_in(*thread, "throw_from") ? 1 : 0;
  }
  CHECK(seen > 0);
}

TEST_CASE("A signal that the program uses is not taken from it",
          "[transport][stacks]") {
  auto child = ::fork(); // it keeps the signal
  if (child == 0) {
    std::signal(stack_signal(), [](int) {});
    auto x = stacks_of_this_process();
    auto kept = x.threads.empty()
                && x.problem.find("SIGRTMAX-7") != std::string::npos;
    ::_exit(kept ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

#endif
