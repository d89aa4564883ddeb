#pragma once

// A run of smp-train whose ranks a test kills, and that goes on.

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/recorded_runs.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace smp::test {

struct restarted_run : recorded_runs {
  static constexpr uint64_t interval = 4; // of checkpoints

  restarted_run()
    : recorded_runs(tiny_gpt(2, 4, 8, R"([optimizer]
lr = 1e-2

[train]
steps = 60
eval_steps = 1
save_model = true

[checkpoint]
dir = "checkpoints"
interval = 4
)")) {
    // nop
  }

  std::unique_ptr<program>
  train(const std::string& run_dir, std::vector<std::string> options,
        const std::map<std::string, std::string>& environment = {},
        const std::vector<std::string>& more = {}) const {
    options.insert(options.begin(),
                   {built_program("smp-train"), "tiny.toml", "--run-dir",
                    run_dir, "--smp.deterministic_server=true"});
    options.insert(options.end(), more.begin(), more.end());
    return std::make_unique<program>(options, path, environment);
  }

  /// Kills a rank of the run in "run" that no earlier call killed.
  /// @param step after as many steps; 0: at its start
  void kill_at(program& x, size_t rank, uint64_t step,
               std::chrono::milliseconds later = {}) {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds{100};
    std::vector<pid_t> ranks;
    for (;;) {
      ranks = children_of(x.pid());
      auto is_new = std::ranges::none_of(
        ranks, [this](pid_t y) { return seen_.contains(y); });
      if (ranks.size() == 2 && is_new && steps_done("run") >= step)
        break;
      x.wait_for("\1", std::chrono::milliseconds{1}); // reads what there is
      if (std::chrono::steady_clock::now() > end
          || ended_within(x.pid(), std::chrono::milliseconds{0}))
        FAIL("no step " << step << '\n' << x.output());
    }
    seen_.insert(ranks.begin(), ranks.end());
    let_pass(later);
    REQUIRE(::kill(ranks.at(rank), SIGKILL) == 0);
  }

private:
  std::set<pid_t> seen_;
};

} // namespace smp::test
