// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

// Who presses Ctrl-Z stops the launcher and none of its ranks.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

const std::string endless = endless_gpt();

const std::string killed = "killed by signal 9 (SIGKILL)";

/// @returns whether the run came to step `x`
bool comes_to(const train_dir& dir, size_t x) {
  for (int attempt = 0; attempt < 3000; ++attempt) {
    if (dir.metrics("run").size() >= x)
      return true;
    let_pass(10ms);
  }
  return false;
}

/// The line of a step, whatever its width.
bool shows(const std::string& output, size_t step) {
  auto line = std::to_string(step) + "/1000000 ";
  return output.find(' ' + line) != std::string::npos
         || output.find('\n' + line) != std::string::npos;
}

} // namespace

// A process that nobody looks after stays as a zombie, which UCX takes for
// alive, and whose end the SUPERVISOR cannot tell.
TEST_CASE("A stopped launcher hides no dead rank", "[apps][launcher]") {
  auto victim = GENERATE(0u, 1u);
  CAPTURE(victim);
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 2);
  run.signal(SIGSTOP);
  REQUIRE(::kill(ranks[victim], SIGKILL) == 0);
  CHECK(ended_within(ranks[1 - victim], 30s));
  // The log of rank 0 is written by the launcher.
  if (victim == 0)
    CHECK_THAT(dir.read("run/log-1.txt"),
               ContainsSubstring("rank 0: " + killed));
  run.signal(SIGCONT);
  CHECK(run.join() == 3);
  auto cause = "rank " + std::to_string(victim) + ": " + killed;
  CHECK_THAT(run.output(), ContainsSubstring("smp: " + cause));
  CHECK_THAT(dir.read("run/end.json"), ContainsSubstring(cause));
  for (auto x : ranks)
    CHECK(is_gone(x));
}

TEST_CASE("A launcher that goes on in between reports the rank that died",
          "[apps][launcher]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 2);
  run.signal(SIGSTOP);
  REQUIRE(::kill(ranks[1], SIGKILL) == 0);
  run.signal(SIGCONT);
  CHECK(run.join() == 3);
  CHECK_THAT(run.output(), ContainsSubstring("smp: rank 1: " + killed));
}

TEST_CASE("A launcher that is stopped for a while loses nothing",
          "[apps][launcher]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  run.signal(SIGSTOP);
  // Less than its pipe takes: then rank 0 would wait for its console.
  auto steps = dir.metrics("run").size() + 50;
  REQUIRE(comes_to(dir, steps));
  run.signal(SIGCONT);
  REQUIRE(comes_to(dir, steps + 50));
  run.signal(SIGINT);
  CHECK(run.join() == 130);
  auto all = dir.metrics("run");
  for (size_t i = 0; i < all.size(); ++i) {
    REQUIRE(all[i].at("step") == i + 1);
    REQUIRE(shows(run.output(), i + 1));
  }
}
