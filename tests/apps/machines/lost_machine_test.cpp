// ctest: seconds=123 label=proof processors=1

// Machines that vanish or are cut off, and ranks that die or stop on one of
// them. Machine 0 has rank 0 and the SUPERVISOR.

#include "tests/support/catch.hpp"

#include "tests/support/runs/machine_runs.hpp"
#include "tests/support/slowness.hpp"

#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

using test_clock = std::chrono::steady_clock;

const std::vector<std::string> short_patience{"--transport.link_timeout=3"};

std::vector<std::string> endless(std::vector<std::string> more) {
  more.insert(more.begin(),
              {"verify", "tiny.toml", "--steps", "100000", "--run-dir", "run"});
  return more;
}

/// Takes a machine from the others, in one of the two ways.
void lose(const machines& on, size_t i) {
  SECTION("its cable is out for good") {
    on.cut(i);
  }
  SECTION("it vanishes") {
    on.vanish(i);
  }
}

} // namespace

TEST_CASE_METHOD(machines_dir, "a machine that is lost is named, in time",
                 "[apps][machines]") {
  const auto lost = GENERATE(size_t{1}, size_t{0});
  start_comparison(100000, short_patience);
  auto begin = test_clock::now();
  lose(on, lost);
  for (size_t rank = 2 - 2 * lost; rank < 4 - 2 * lost; ++rank) {
    CHECK(running[rank]->join(60s) == 3);
    INFO(output(rank));
    CHECK_THAT(output(rank), ContainsSubstring("machine " + on.name(lost)));
  }
  CHECK(test_clock::now() - begin < 20s);
  if (lost == 1) {
    INFO(output(0));
    CHECK_THAT(output(0),
               ContainsSubstring("lost with machine mb (ranks 2, 3)"));
  }
  // On its side the others are lost, or it is gone itself.
  for (size_t rank = 2 * lost; rank < 2 * lost + 2; ++rank) {
    auto code = running[rank]->join(60s);
    CHECK((code == 3 || code == -SIGKILL));
  }
  CHECK(test_clock::now() - begin < 30s);
}

TEST_CASE_METHOD(launchers, "a launcher names a machine that is lost, in time",
                 "[apps][machines]") {
  const auto lost = GENERATE(size_t{1}, size_t{0});
  start_launchers(endless(short_patience));
  await_steps();
  auto begin = test_clock::now();
  lose(on, lost);
  CHECK(running[1 - lost]->join(60s) == 3);
  CHECK(test_clock::now() - begin < 20s);
  INFO(output(1 - lost));
  CHECK_THAT(output(1 - lost), ContainsSubstring("machine " + on.name(lost)));
  auto code = running[lost]->join(60s);
  CHECK((code == 3 || code == -SIGKILL));
  CHECK(test_clock::now() - begin < 30s);
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 10s));
}

TEST_CASE_METHOD(launchers,
                 "a launcher tells the others how one of its ranks died",
                 "[apps][machines]") {
  start_launchers(endless({}));
  await_steps();
  auto begin = test_clock::now();
  // Of the machine without the SUPERVISOR, and of the one with it.
  const auto rank = GENERATE(size_t{3}, size_t{1});
  REQUIRE(::kill(process_of(rank), SIGKILL) == 0);
  CHECK(join_all() == std::vector{3, 3});
  CHECK(test_clock::now() - begin < 10s);
  INFO(output(0) << output(1));
  auto name = "rank " + std::to_string(rank) + ": ";
  CHECK_THAT(output(0),
             ContainsSubstring(name + "killed by signal 9 (SIGKILL)"));
  // The second launcher may hear only that a connection broke.
  CHECK_THAT(output(1), ContainsSubstring(name));
}

TEST_CASE_METHOD(launchers,
                 "a rank that is stopped on another machine ends the run by "
                 "its name",
                 "[apps][machines][R7]") {
  start_launchers(
    endless({"--monitor.on_stall=end", "--monitor.stall_timeout=5"}));
  await_steps();
  // If all of that machine are, only its launcher can say so there.
  const bool all_of_it = GENERATE(false, true);
  for (size_t rank = 2; rank < (all_of_it ? 4 : 3); ++rank)
    REQUIRE(::kill(process_of(rank), SIGSTOP) == 0);
  CHECK(join_all() == std::vector{4, 4});
  for (size_t i : {0, 1}) {
    INFO(output(i));
    CHECK_THAT(output(i), ContainsSubstring("not answered for")
                            && ContainsSubstring("rank 2"));
    CHECK(on.empty_within(i, 10s));
  }
}

TEST_CASE_METHOD(machines_dir, "so it does where nobody watches its process",
                 "[apps][machines][R7]") {
  start_comparison(100000,
                   {"--monitor.on_stall=end", "--monitor.stall_timeout=5"});
  running[2]->signal(SIGSTOP);
  for (size_t rank : {0, 1, 3})
    CHECK(running[rank]->join(60s) == 4);
  INFO(output(0));
  CHECK_THAT(output(0), ContainsSubstring("rank 2 has not answered for"));
  running[2]->signal(SIGKILL);
}

TEST_CASE_METHOD(launchers,
                 "who looks at a run from the side that is left sees which "
                 "ranks do not answer",
                 "[apps][machines][inspect]") {
  start_launchers(endless({"--transport.link_timeout=10"}));
  await_steps();
  auto look = [&](const std::string& what) {
    auto x = on.start(0, {built_program("smp-inspect"), "run", what}, path);
    auto code = x.join();
    return std::pair{code, x.output()};
  };
  // Who is slow for a moment is shown as silent.
  auto well = look("ls");
  for (int attempt = 0; attempt < 20 && well.first != 0; ++attempt)
    well = look("ls");
  {
    INFO(well.second);
    CHECK(well.first == 0);
  }
  lose(on, 1);
  // By the clock of somebody else, who is late on a busy machine. So may be the
  // SUPERVISOR and a rank that is left.
  std::pair<int, std::string> seen;
  std::chrono::duration<double> took{};
  auto names = [&](const char* rank) {
    return seen.second.find(rank) != std::string::npos;
  };
  for (int attempt = 0; attempt < 5; ++attempt) {
    slowness machine;
    auto begin = test_clock::now();
    seen = look("ls");
    took = (test_clock::now() - begin) / machine.factor();
    if (took < 1s && names("rank 2 is ") && names("rank 3 is ")
        && !names("rank 0 is ") && !names("rank 1 is "))
      break;
  }
  {
    INFO(seen.second);
    CHECK(seen.first == 1);
    for (auto rank : {"rank 2 is ", "rank 3 is "})
      CHECK(names(rank));
    for (auto rank : {"rank 0 is ", "rank 1 is "})
      CHECK_FALSE(names(rank));
    CHECK(took < 1s);
  }
  CHECK(running[0]->join(60s) == 3);
  CHECK(look("waits").first == 3);
  running[1]->join(60s);
}

TEST_CASE_METHOD(machines_dir,
                 "a rank that does not begin is named long before the run "
                 "gives it up",
                 "[apps][machines][R7]") {
  const std::vector<std::string> words{"verify", "tiny.toml", "--steps",
                                       "100000", "--monitor.stall_timeout=2"};
  for (size_t i = 0; i < 3; ++i)
    start_rank(i, on.name(0), words);
  CHECK(running[0]->wait_for("smp: rank 3 has not joined", 60s));
  start_rank(3, on.name(0), words);
  await_steps();
}
