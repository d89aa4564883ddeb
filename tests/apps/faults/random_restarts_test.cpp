// ctest: seconds=150 label=proof alone

#include "tests/support/catch.hpp"

#include "tests/support/restarted_run.hpp"

#include <algorithm>
#include <random>

using namespace smp::test;

TEST_CASE_METHOD(restarted_run,
                 "thirty kills at any moment change no bit of a run",
                 "[apps][restarts][R51]") {
  constexpr uint64_t kills = 30;
  const std::vector<std::string> long_run{"--train.steps=600",
                                          "--train.eval_interval=50"};
  auto whole = train("whole", {"--checkpoint.dir=other"}, {}, long_run);
  REQUIRE(whole->join() == 0);
  auto run = train("run", {"--train.max_restarts=100"}, {}, long_run);
  std::mt19937 random{20261130};
  uint64_t step = 0;
  bool at_start = false;
  for (uint64_t i = 0; i < kills; ++i) {
    // Now and then before the ranks that were just started made a step.
    at_start = random() % 4 == 0 && !at_start && i > 0;
    if (!at_start)
      step = std::max(step, steps_done("run")) + 1 + random() % 8;
    INFO("kill " << i << (at_start ? " at a start" : "") << ", step " << step);
    kill_at(*run, random() % 2, at_start ? 0 : step,
            std::chrono::milliseconds{random() % (at_start ? 400 : 8)});
  }
  auto code = run->join(std::chrono::seconds{200});
  INFO(run->output());
  REQUIRE(code == 0);
  check_same_model("run", "whole");
  auto restarts = check_metrics("run", 0);
  CHECK(restarts.size() == kills);
  for (auto& x : restarts) {
    INFO(x.dump());
    // What was being written is lost as well; the one before it is not.
    CHECK(x["at_step"].get<uint64_t>() - 1 - x["from_step"].get<uint64_t>()
          <= 2 * interval);
  }
}
