// ctest: seconds=35 label=proof processors=2 serial

#include "tests/support/catch.hpp"

#include "tests/support/random_faults.hpp"
#include "tests/support/runs/processes.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <random>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

/// Four processes that compute as long as this lives.
class busy_loops {
public:
  busy_loops() {
    for (auto& pid : pids_) {
      pid = ::fork();
      if (pid != 0)
        continue;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;)
        asm volatile(""); // else the compiler may leave the loop out
    }
  }

  ~busy_loops() {
    for (auto pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  busy_loops(const busy_loops&) = delete;
  busy_loops& operator=(const busy_loops&) = delete;

private:
  std::array<pid_t, 4> pids_{};
};

/// Kills a rank at a random moment of a run.
/// @returns how long the run lasted then, in seconds
double seconds_after_kill(std::mt19937& random) {
  train_dir dir{short_run};
  auto run = dir.start(
    {"tiny.toml", "--run-dir", "run", "--train.steps=1000000"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 3);
  let_pass(std::chrono::milliseconds{random() % 200});
  auto victim = random() % 3;
  auto begin = std::chrono::steady_clock::now();
  REQUIRE(::kill(ranks[victim], SIGKILL) == 0);
  CHECK(run.join() == 3);
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK_THAT(run.output(), ContainsSubstring(fmt::format(
                             "rank {}: killed by signal 9", victim)));
  for (auto x : ranks)
    CHECK(is_gone(x));
  return took.count();
}

} // namespace

// Where the processes ended with their static objects, one kill in eleven took
// longer. The best of a few would hide that; so many kills show it two times in
// three.
TEST_CASE(
  "a run whose rank is killed is over in two seconds, also on a busy "
  "machine",
  "[apps][faults]") {
  busy_loops around;
  std::mt19937 random{1};
  std::vector<double> took;
  for (int i = 0; i < 24; ++i)
    took.push_back(seconds_after_kill(random));
  std::sort(took.begin(), took.end());
  CAPTURE(took);
  // One may have had bad luck with whatever else the machine does.
  CHECK(took[took.size() - 2] < 2);
}
