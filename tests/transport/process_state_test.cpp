#include "tests/support/catch.hpp"

#include "transport/process_state.hpp"

#include <csignal>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

using namespace smp;

TEST_CASE("The kernel tells whether a process runs, is stopped or gone",
          "[transport]") {
  auto me = state_of_process(::getpid());
  REQUIRE(me);
  CHECK(me->letter == 'R');
  CHECK_FALSE(me->stopped());
  CHECK_FALSE(me->exiting);
  CHECK(me->start_time > 0);
  auto child = ::fork();
  if (child == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  auto stopped = state_of_process(child);
  REQUIRE(stopped);
  CHECK(stopped->stopped());
  CHECK_FALSE(stopped->exiting);
  CHECK(stopped->start_time >= me->start_time);
  ::kill(child, SIGKILL);
  siginfo_t info{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT)
          == 0);
  auto killed = state_of_process(child); // nobody has looked yet
  CHECK(killed->ended());
  CHECK(killed->exiting);
  CHECK(killed->end.signal == SIGKILL);
  CHECK(killed->end.describe() == "killed by signal 9 (SIGKILL)");
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK_FALSE(state_of_process(child));
}

TEST_CASE("The kernel tells how a process ended that nobody looked after",
          "[transport]") {
  auto code = GENERATE(0, 7);
  auto child = ::fork();
  if (child == 0)
    ::_exit(code);
  siginfo_t info{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT)
          == 0);
  auto ended = state_of_process(child);
  REQUIRE(ended);
  CHECK(ended->end.code == code);
  CHECK(ended->end.signal == 0);
  CHECK(ended->end.describe() == "exited with code " + std::to_string(code));
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
}

TEST_CASE("A process knows its memory", "[transport]") {
  auto x = memory_of_this_process();
  CHECK(x.now > 1'000'000);
  CHECK(x.peak >= x.now / 2);
}
