#include "tests/support/catch.hpp"

#include "runtime/files/folder_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using namespace std::chrono_literals;

namespace {

std::string other_run(const std::string& dir) {
  return test::error_of(
    [&] {
      folder_lock{dir, "another", 0ms};
    },
    error_code::config);
}

} // namespace

TEST_CASE("a folder is kept for one run, which others are told",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = (scratch.path / "new/folder").string();
  std::optional<folder_lock> mine{std::in_place, dir, "run runs/x"};
  CHECK_THAT(other_run(dir),
             ContainsSubstring(dir
                               + ": another run saves its checkpoints there, "
                                 "run runs/x; wait until it ends"));
  mine.reset();
  CHECK(other_run(dir) == "no error");
  CHECK_THAT(other_run(scratch.write("file", "")),
             ContainsSubstring("cannot make "));
}

TEST_CASE("the lock of a run that was killed is gone",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  int told[2];
  REQUIRE(::pipe(told) == 0);
  auto pid = ::fork();
  if (pid == 0) {
    folder_lock mine{scratch.path, "a long name of a run"};
    [[maybe_unused]] auto n = ::write(told[1], "x", 1);
    ::pause();
    ::_exit(1);
  }
  char x = 0;
  REQUIRE(::read(told[0], &x, 1) == 1);
  CHECK_THAT(other_run(scratch.path), ContainsSubstring("a long name"));
  ::kill(pid, SIGKILL);
  REQUIRE(::waitpid(pid, nullptr, 0) == pid);
  CHECK(other_run(scratch.path) == "no error");
  CHECK(scratch.read(".smp-lock") == "another"); // all of the old name is gone
  ::close(told[0]);
  ::close(told[1]);
}
