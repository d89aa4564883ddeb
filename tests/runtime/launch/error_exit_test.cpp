// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

using namespace smp;
using namespace smp::test;

namespace {

/// What one or two ranks wrote that fail as $FAILS says.
struct uncaught {
  uncaught(const char* tag, const std::string& fails) {
    program run{this_program(tag), ".", {{"FAILS", fails}, {"SMP_RANK", ""}}};
    code = run.join();
    output = run.output();
    std::istringstream in{output};
    for (std::string line; std::getline(in, line);)
      if (line.find("no luck") != std::string::npos)
        told.push_back(line);
  }

  int code = 0;
  std::string output;
  std::vector<std::string> told;
};

using lines = std::vector<std::string>;

} // namespace

// Catch2 would catch what leaves a test case, so it leaves a thread.
TEST_CASE("a rank that an error ends", "[.error_exit_rank]") {
  end_on_uncaught_errors();
  std::string fails = std::getenv("FAILS");
  auto here = read_rank_environment();
  if (fails == "other" || (here && fails == "1 other" && here->rank == 1))
    std::thread{[] { throw std::runtime_error{"no luck"}; }}.join();
  if (fails == "memory")
    std::thread{[] { throw std::bad_alloc{}; }}.join();
  if (here && fails != "all" && fails != std::to_string(here->rank))
    ::pause(); // until the launcher ends it
  std::thread{[] { throw config_error("no luck"); }}.join();
}

TEST_CASE("the launcher of such ranks", "[.error_exit_launcher]") {
  launch_options x;
  x.ranks = 2;
  x.command = this_program("[.error_exit_rank]");
  if (auto* logs = std::getenv("LOGS"))
    x.log_dir = logs;
  // Both end by themselves, one perhaps long after the other.
  if (std::getenv("FAILS") == std::string{"all"})
    x.grace = std::chrono::seconds{20};
  auto code = launch(x);
  fmt::print("launch returned {}\n", code);
}

TEST_CASE("an error that nobody catches is one line and its exit code",
          "[runtime][launch]") {
  uncaught x{"[.error_exit_rank]", "all"};
  INFO(x.output);
  CHECK(x.code == 2);
  CHECK(x.told == lines{"error: no luck"});
}

// What is written to /dev/full fails as on a disk that is full.
TEST_CASE("an error that cannot be said is still an exit code",
          "[runtime][launch]") {
  auto command = this_program("[.error_exit_rank]");
  program{
    {"sh", "-c", "exec \"$0\" \"$1\" 2>/dev/full", command[0], command[1]},
    ".",
    {{"FAILS", "all"}, {"SMP_RANK", ""}}}
    .finish(2);
}

TEST_CASE("the launcher says what the log of a rank did not take",
          "[runtime][launch]") {
  scratch_dir dir;
  std::filesystem::create_symlink("/dev/full", dir.path / "log-1.txt");
  program run{this_program("[.error_exit_launcher]"),
              ".",
              {{"FAILS", "1"}, {"SMP_RANK", ""}, {"LOGS", dir.path}}};
  run.join();
  INFO(run.output());
  CHECK(run.output().find("launch returned 2\n") != std::string::npos);
  CHECK(run.output().find("smp: rank 1: exited with code 2: no luck")
        != std::string::npos);
}

TEST_CASE("the launcher says what the error in a log was, and no more",
          "[runtime][launch]") {
  scratch_dir dir;
  program run{this_program("[.error_exit_launcher]"),
              ".",
              {{"FAILS", "1"}, {"SMP_RANK", ""}, {"LOGS", dir.path}}};
  run.join();
  INFO(run.output());
  CHECK(run.output().find("smp: rank 1: exited with code 2: no luck; its "
                          "output: "
                          + (dir.path / "log-1.txt").string() + "\n")
        != std::string::npos);
}

TEST_CASE("the launcher says which exception left the main of a rank",
          "[runtime][launch]") {
  scratch_dir dir;
  program run{this_program("[.error_exit_launcher]"),
              ".",
              {{"FAILS", "1 other"}, {"SMP_RANK", ""}, {"LOGS", dir.path}}};
  run.join();
  INFO(run.output());
  CHECK(run.output().find("smp: rank 1: killed by signal 6 (SIGABRT): no luck; "
                          "its output: ")
        != std::string::npos);
}

TEST_CASE("a thread that gets no memory ends a program with a text",
          "[runtime][launch]") {
  uncaught x{"[.error_exit_rank]", "memory"};
  INFO(x.output);
  CHECK(x.code == 2);
  CHECK(x.output.find("error: no more memory") != std::string::npos);
}

TEST_CASE("an exception of others ends a program as ever",
          "[runtime][launch]") {
  uncaught x{"[.error_exit_rank]", "other"};
  INFO(x.output);
  CHECK(x.code == -SIGABRT);
  CHECK_FALSE(x.told.empty());
}

TEST_CASE("what ends several ranks is told once", "[runtime][launch]") {
  auto [fails, line] = GENERATE(table<std::string, std::string>(
    {{"all", "error: no luck"},
     {"0", "error: no luck"},
     {"1", "smp: rank 1: exited with code 2: no luck"}}));
  uncaught x{"[.error_exit_launcher]", fails};
  INFO(x.output);
  CHECK(x.output.find("launch returned 2\n") != std::string::npos);
  CHECK(x.told == lines{line});
}

namespace {

struct says_its_end {
  ~says_its_end() {
    std::fputs("destroyed", stdout);
  }
};

} // namespace

TEST_CASE("a program that ends at once", "[.error_exit_at_once]") {
  static says_its_end x;
  std::fputs("written, ", stdout);
  std::cout << "streamed";
  exit_at_once(7);
}

TEST_CASE("a process that ends at once has said all, and destroys nothing more",
          "[runtime][launch]") {
  program run{this_program("[.error_exit_at_once]"), ".", {{"SMP_RANK", ""}}};
  CHECK(run.join() == 7);
  INFO(run.output());
  CHECK(run.output().find("written, ") != std::string::npos);
  CHECK(run.output().find("streamed") != std::string::npos);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(run.output().find("destroyed") == std::string::npos);
#endif
}

TEST_CASE("exit codes are those of docs/errors.md", "[runtime][launch]") {
  CHECK(exit_code_of(error_code::config) == 2);
  CHECK(exit_code_of(error_code::user_code) == 3);
  CHECK(exit_code_of(error_code::rank_down) == 3);
  CHECK(exit_code_of(error_code::stalled) == 4);
  CHECK(exit_code_of(error_code::numbers) == 5);
  CHECK(exit_code_of(error_code::internal) == 3);
}
