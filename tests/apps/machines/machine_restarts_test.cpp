// ctest: seconds=60 label=multiprocess processors=2

// Runs over several machines that are started again (docs/recovery.md).

#include "tests/support/catch.hpp"

#include "tests/support/runs/machine_runs.hpp"
#include "tests/support/runs/processes.hpp"

#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

pid_t parent_of(pid_t x) {
  const std::string before = "PPid:\t";
  auto text = content_of(fmt::format("/proc/{}/status", x));
  return std::stoi(text.substr(text.find(before) + before.size()));
}

struct restarted_machines : launchers {
  static std::vector<std::string> words(const std::string& run_dir,
                                        const std::string& checkpoints,
                                        int steps = 24) {
    return {"tiny.toml",
            "--run-dir",
            run_dir,
            fmt::format("--train.steps={}", steps),
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
  by_srun = true; // only the unharmed one was not
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

// -- elastic ------------------------------------------------------------------

namespace {

struct elastic_machines : restarted_machines {
  /// Two replicas of two stages, one on each machine.
  static std::vector<std::string>
  elastic_words(const std::string& run_dir,
                std::vector<std::string> more = {}) {
    auto result = words(run_dir, run_dir + "-checkpoints", 40);
    result.insert(result.end(),
                  {"--smp.ddp=true", "--smp.pipeline_parallel_degree=2",
                   "--train.elastic=true"});
    result.insert(result.end(), more.begin(), more.end());
    return result;
  }

  /// Which ranks add the samples of a step changes only how sums are rounded.
  void check_same_losses(const std::string& run_dir,
                         const std::string& other) const {
    std::map<uint64_t, double> expected, found;
    for (auto& x : metrics(other))
      expected[x["step"]] = x["loss"];
    for (auto& x : metrics(run_dir))
      if (x.contains("step"))
        found[x["step"]] = x["loss"];
    REQUIRE(found.size() == expected.size());
    for (auto& [step, loss] : expected) {
      INFO("step " << step);
      CHECK(found[step] == Catch::Approx(loss).epsilon(1e-4));
    }
  }
};

} // namespace

TEST_CASE_METHOD(elastic_machines,
                 "replicas that are left go on without a machine, and with it "
                 "when it is back",
                 "[apps][machines][restarts]") {
  const auto sharded = GENERATE(false, true);
  std::vector<std::string> more;
  if (sharded)
    more.insert(more.end(),
                {"--smp.shard_optimizer_state=true", "--optimizer.type=adamw"});
  start_launchers(elastic_words("whole", more));
  auto unharmed = join_all();
  INFO(output(0));
  REQUIRE(unharmed == std::vector{0, 0});
  running.clear();
  start_launchers(elastic_words("run", more));
  await_step(6);
  running[1]->signal(SIGKILL);
  running[1]->join();
  REQUIRE(running[0]->wait_for(
    "smp: goes on with 2 of 4 ranks until the others are back\n"));
  await_step(14);
  running[1] = start_launcher(1, elastic_words("run", more));
  auto codes = join_all();
  INFO(output(0) << output(1));
  REQUIRE(codes == std::vector{0, 0});
  CHECK_THAT(output(0), !ContainsSubstring("with the same command"));
  CHECK_THAT(output(0), ContainsSubstring("smp: machine 1 is back: saving, to "
                                          "start again with it\n")
                          && ContainsSubstring("done; starts again, from "));
  check_same_losses("run", "whole");
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 10s));
}

TEST_CASE_METHOD(restarted_machines,
                 "ssh is tried again on a machine that was lost",
                 "[apps][machines][restarts]") {
  auto ssh = write("bin/ssh", on.stand_in_for_ssh());
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  std::vector<std::string> words{
    "tiny.toml", "--ranks", "4",         "--hosts", "ma:2,mb:2",
    "--keys",    "keys",    "--run-dir", "run",     "--train.steps=1000000"};
  words.insert(words.end(),
               {"--train.max_restarts=5", "--checkpoint.interval=50",
                "--checkpoint.dir=checkpoints"});
  auto run = start(
    words, {{"PATH", (path / "bin").string() + ':' + std::getenv("PATH")}});
  auto begin = std::chrono::steady_clock::now();
  REQUIRE(run.wait_for("checkpoint at step 50"));
  // What cannot be reached at first is a mistake.
  while (std::chrono::steady_clock::now() - begin < 11s)
    run.wait_for("\1", 100ms);
  REQUIRE(::kill(parent_of(process_of(3)), SIGKILL) == 0);
  REQUIRE(run.wait_for("smp: machine mb: ssh "));
  REQUIRE(run.wait_for("; it is tried again every 5 s\n"));
  REQUIRE(run.wait_for("restart 1 of 5 in 1 s, from "));
  auto at = steps_done("run");
  while (steps_done("run") < at + 10)
    if (!run.wait_for("\1", 10ms) && ended_within(run.pid(), 0ms))
      FAIL(run.output());
  run.signal(SIGINT);
  CHECK(run.join() == 130);
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 60s));
}
