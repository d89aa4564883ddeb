// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/init.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/session.hpp"
#include "runtime/session/step.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

// A program that smp::init starts as the ranks of a run: what others see of it.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace fs = std::filesystem;

// As main, with the arguments in $ARGUMENTS, until there is a file "enough".
// Files "help", "step", "leave" and "fail" say what it does before.
TEST_CASE("a program that somebody wrote", "[.own_program]") {
  std::vector<std::string> words{"bin/own"};
  std::istringstream arguments{std::getenv("ARGUMENTS")};
  for (std::string x; arguments >> x;)
    words.push_back(x);
  std::vector<char*> argv;
  for (auto& x : words)
    argv.push_back(x.data());
  argv.push_back(nullptr);
  smp::init(static_cast<int>(words.size()), argv.data());
  if (fs::exists("help")) {
    std::cout << "usage: own\n";
    return;
  }
  auto here = smp::read_rank_environment();
  smp::session session{
    {.pipeline_parallel_degree = here ? here->world_size : 1}};
  // (Catch2 has written already, after which fmt::print flushes no lines.)
  std::cout << fmt::format("rank {} of {} in '{}'\n", session.rank(),
                           session.size(), session.run_dir());
  if (fs::exists("step"))
    smp::step([] {})();
  if (fs::exists("leave") && session.rank() == 1)
    std::exit(0);
  if (fs::exists("fail"))
    throw smp::config_error("no weights");
  try {
    while (!smp::any_rank(fs::exists("enough"))) {
      // Others look.
    }
  } catch (const smp::error&) {
    std::terminate(); // as if it left main: Catch2 would catch it
  }
}

namespace {

struct own_program : scratch_dir {
  program start(const std::string& arguments) const {
    return program{
      this_program("[.own_program]"), path, {{"ARGUMENTS", arguments}}};
  }

  /// @returns what a program said that looks at run "run", at last without
  /// anything wrong: who is late for a moment is that
  std::string look(std::vector<std::string> command) const {
    command[0] = built_program(command[0]);
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    for (;;) {
      program x{command, path};
      auto code = x.join();
      if (code != 0 && std::chrono::steady_clock::now() < end)
        continue;
      INFO(x.output());
      CHECK(code == 0);
      return x.output();
    }
  }
};

} // namespace

TEST_CASE_METHOD(own_program, "A program of one's own can be looked at",
                 "[apps][inspect]") {
  const auto ranks = GENERATE(1, 2);
  CAPTURE(ranks);
  auto run = start(fmt::format("--ranks {} --run-dir run", ranks));
  // Each line at once, although it is not a terminal that rank 0 writes to.
  REQUIRE(run.wait_for(fmt::format("rank 0 of {} in 'run'\n", ranks)));
  auto ls = nlohmann::json::parse(look({"smp-inspect", "run", "ls", "--json"}));
  CHECK(ls.at("state") == "running");
  std::set<std::string> ids;
  for (auto& actor : ls.at("actors"))
    ids.insert(actor.at("id"));
  CHECK(ids.contains("r0"));
  CHECK(ids.contains("r1") == (ranks == 2));
  CHECK_THAT(look({"smp-top", "run", "--once"}),
             ContainsSubstring("run  running\n"));
  write("enough", "");
  CHECK(run.join() == 0);
  CHECK_THAT(run.output(), ContainsSubstring("smp: run dir run\n"));
  CHECK_THAT(content_of(path / "run/log-0.txt"),
             ContainsSubstring("rank 0 of"));
  CHECK_FALSE(fs::exists(path / "run/inspect.entry"));
  CHECK_FALSE(fs::exists(path / "runs"));
  if (ranks == 2) {
    CHECK_THAT(content_of(path / "run/log-1.txt"),
               ContainsSubstring("rank 1 of 2 in 'run'\n"));
    CHECK_THAT(run.output(), !ContainsSubstring("rank 1 of"));
  }
  program after{{built_program("smp-inspect"), "run", "ls"}, path};
  CHECK(after.join() == 3);
  CHECK(after.output() == "run: ended: the run ended with exit code 0\n");
}

TEST_CASE_METHOD(own_program, "One rank leaves no directory nobody asked for",
                 "[apps][inspect]") {
  write("enough", "");
  auto arguments = GENERATE(as<std::string>{}, "--ranks 1", "--help",
                            "--run-dir run");
  CAPTURE(arguments);
  CHECK_THAT(start(arguments).finish(),
             ContainsSubstring("rank 0 of 1 in ''\n"));
  for (auto& x : fs::directory_iterator{path})
    CHECK(x.path().filename() == "enough");
}

TEST_CASE_METHOD(own_program, "A rank that leaves without a word is named",
                 "[apps]") {
  write("step", "");
  write("leave", "");
  auto run = start("--ranks 2 --run-dir run");
  CHECK(run.join() == 3);
  const std::string cause
    = "rank 1: ended with code 0 after step 1, before the others";
  CHECK_THAT(run.output(), ContainsSubstring("smp: " + cause + "; its output"));
  CHECK_THAT(content_of(path / "run/end.json"), ContainsSubstring(cause));
}

TEST_CASE_METHOD(own_program, "What failed before its first step is not a run",
                 "[apps]") {
  write("enough", "");
  write("fail", "");
  CHECK(start("--ranks 2 --run-dir run").join() != 0);
  CHECK(fs::exists(path / "run/log-1.txt"));
  fs::remove(path / "fail");
  auto output = start("--ranks 1 --run-dir run").finish();
  CHECK_THAT(output,
             ContainsSubstring("smp: the run in run ended before its first "
                               "step was over; it is overwritten\n"
                               "smp: run dir run\n"));
  CHECK_FALSE(fs::exists(path / "run/log-1.txt")); // nor what else it left
  auto third = start("--ranks 1 --run-dir run");   // the second one ended well
  CHECK(third.join() != 0);
  CHECK_THAT(third.output(),
             ContainsSubstring("holds a run already (run/log-0.txt)"));
}

TEST_CASE_METHOD(own_program, "What failed after its first step is a run",
                 "[apps]") {
  const auto ranks = GENERATE(1, 2);
  CAPTURE(ranks);
  write("enough", "");
  write("step", "");
  write("fail", "");
  auto arguments = fmt::format("--ranks {} --run-dir run", ranks);
  CHECK(start(arguments).join() != 0);
  auto before = content_of(path / "run/log-0.txt");
  auto again = start(arguments);
  CHECK(again.join() != 0);
  CHECK_THAT(again.output(),
             ContainsSubstring("holds a run already (run/log-0.txt)"));
  CHECK(content_of(path / "run/log-0.txt") == before);
}

TEST_CASE_METHOD(own_program, "The help of a program leaves no directory",
                 "[apps]") {
  write("help", "");
  auto help = start("--ranks 2");
  CHECK(help.join() == 0);
  CHECK_THAT(help.output(), ContainsSubstring("usage: own\n")
                              && ContainsSubstring(" is removed: no rank began "
                                                   "a session\n"));
  CHECK(fs::is_empty(path / "runs"));
  // One that was named stays, and is not a run.
  CHECK(start("--ranks 2 --run-dir run").join() == 0);
  CHECK(fs::exists(path / "run/log-0.txt"));
  fs::remove(path / "help");
  write("enough", "");
  CHECK(start("--ranks 2 --run-dir run").join() == 0);
}

TEST_CASE_METHOD(own_program, "A directory has to be named",
                 "[apps][inspect]") {
  // Catch2 tells what left the test case.
  auto run = start(GENERATE(as<std::string>{}, "--ranks 2 --run-dir",
                            "--run-dir= --ranks=2", "--run-dir --ranks 2"));
  CHECK(run.join() != 0);
  CHECK_THAT(run.output(),
             ContainsSubstring("--run-dir: expected a directory"));
  CHECK(fs::is_empty(path));
}
