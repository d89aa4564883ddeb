// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "tests/support/program.hpp"

#include <fmt/format.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

using namespace smp;
using namespace smp::test;

namespace {

std::vector<std::string> self(const char* tag) {
  return {std::filesystem::read_symlink("/proc/self/exe"), tag};
}

/// What one or two ranks wrote that fail as $FAILS says.
struct uncaught {
  uncaught(const char* tag, const std::string& fails) {
    program run{self(tag), ".", {{"FAILS", fails}, {"SMP_RANK", ""}}};
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
  if (fails == "other")
    std::thread{[] { throw std::runtime_error{"no luck"}; }}.join();
  if (here && fails != "all" && fails != std::to_string(here->rank))
    ::pause(); // until the launcher ends it
  std::thread{[] { throw config_error("no luck"); }}.join();
}

TEST_CASE("the launcher of such ranks", "[.error_exit_launcher]") {
  launch_options x;
  x.ranks = 2;
  x.command = self("[.error_exit_rank]");
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

TEST_CASE("exit codes are those of docs/errors.md", "[runtime][launch]") {
  CHECK(exit_code_of(error_code::config) == 2);
  CHECK(exit_code_of(error_code::user_code) == 3);
  CHECK(exit_code_of(error_code::rank_down) == 3);
  CHECK(exit_code_of(error_code::stalled) == 4);
  CHECK(exit_code_of(error_code::numbers) == 5);
  CHECK(exit_code_of(error_code::internal) == 3);
}
