// ctest: seconds=60 label=multiprocess processors=2

// Runs over several machines that are started again (docs/recovery.md).

#include "tests/support/catch.hpp"

#include "tests/support/runs/machine_runs.hpp"

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

struct restarted_machines : launchers {
  static std::vector<std::string> words(const std::string& run_dir,
                                        const std::string& checkpoints) {
    return {"tiny.toml",
            "--run-dir",
            run_dir,
            "--train.steps=24",
            "--train.save_model=true",
            "--train.max_restarts=5",
            "--smp.deterministic_server=true",
            "--checkpoint.interval=4",
            "--checkpoint.dir=" + checkpoints};
  }

  /// Waits until the run has made so many steps, all of them counted.
  void await_step(uint64_t step, const std::string& run_dir = "run") {
    auto end = std::chrono::steady_clock::now() + 100s;
    while (steps_done(run_dir) < step) {
      if (std::chrono::steady_clock::now() > end)
        FAIL("no step " << step << '\n' << output(0) << output(1));
      for (auto& x : running)
        x->wait_for("\1", 1ms); // reads what there is
    }
  }

  void train_unharmed() {
    start_launchers(words("whole", "other"));
    REQUIRE(join_all() == std::vector{0, 0});
    running.clear();
  }
};

} // namespace

TEST_CASE_METHOD(restarted_machines,
                 "a run over machines whose ranks are killed goes on to the "
                 "last bit",
                 "[apps][machines][restarts]") {
  train_unharmed();
  start_launchers(words("run", "checkpoints"));
  await_step(6);
  REQUIRE(::kill(process_of(3), SIGKILL) == 0); // of the second machine
  REQUIRE(running[0]->wait_for("restart 1 of 5 in 1 s, from "));
  await_step(10);
  REQUIRE(::kill(process_of(1), SIGKILL) == 0); // of the first one
  auto codes = join_all();
  INFO(output(0) << output(1));
  REQUIRE(codes == std::vector{0, 0});
  check_same_model("run", "whole");
  auto restarts = check_metrics("run", 0);
  REQUIRE(restarts.size() == 2);
  CHECK(restarts[0]["cause"] == "rank 3: killed by signal 9 (SIGKILL)");
  CHECK(restarts[1]["cause"] == "rank 1: killed by signal 9 (SIGKILL)");
  CHECK_THAT(output(1),
             ContainsSubstring("smp: rank 3: killed by signal 9 (SIGKILL)")
               && ContainsSubstring("; waits for the first machine to begin "
                                    "again\n"));
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 10s));
}

TEST_CASE_METHOD(restarted_machines,
                 "a machine that comes back takes part again",
                 "[apps][machines][restarts]") {
  train_unharmed();
  start_launchers(words("run", "checkpoints"));
  await_step(6);
  const auto lost = GENERATE(size_t{1}, size_t{0});
  CAPTURE(lost);
  running[lost]->signal(SIGKILL);
  running[lost]->join();
  // The machine of the SUPERVISOR begins a run directory of its own.
  std::string now = lost == 0 ? "second" : "run";
  REQUIRE(running[1 - lost]->wait_for(lost == 0 ? "to begin again\n"
                                                : "restart 1 of 5 in 1 s"));
  running[lost] = start_launcher(lost, words(now, "checkpoints"));
  auto codes = join_all();
  INFO(output(0) << output(1));
  REQUIRE(codes == std::vector{0, 0});
  check_same_model(now, "whole");
}

TEST_CASE_METHOD(restarted_machines,
                 "all machines end when the run is not started again",
                 "[apps][machines][restarts]") {
  auto more = words("run", "checkpoints");
  SECTION("as what fails would fail again") {
    more.emplace_back("--optimizer.lr=1e30");
    start_launchers(more);
    auto codes = join_all();
    INFO(output(0) << output(1));
    CHECK(codes[0] == 5);
    CHECK(codes[1] != 0);
  }
  SECTION("as the user interrupts the wait") {
    start_launchers(more);
    await_step(1);
    REQUIRE(::kill(process_of(3), SIGKILL) == 0);
    REQUIRE(running[0]->wait_for("restart 1 of 5 in 1 s, from "));
    running[0]->signal(SIGINT);
    auto codes = join_all();
    INFO(output(0) << output(1));
    CHECK(codes == std::vector{130, 3});
  }
  SECTION("as the user interrupts the other side of it") {
    start_launchers(more);
    await_step(1);
    running[0]->signal(SIGKILL);
    REQUIRE(running[1]->wait_for("to begin again\n"));
    running[1]->signal(SIGINT);
    running[0]->join();
    CHECK(running[1]->join() == 130);
  }
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 10s));
}
