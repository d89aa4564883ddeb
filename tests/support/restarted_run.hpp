#pragma once

// A run of smp-train whose ranks a test kills, and that goes on.

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace smp::test {

struct restarted_run : train_dir {
  static constexpr uint64_t interval = 4; // of checkpoints

  restarted_run()
    : train_dir(tiny_gpt(2, 4, 8, R"([optimizer]
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

  /// @returns the complete lines of metrics.jsonl, which may not be there yet
  std::vector<nlohmann::json> lines(const std::string& run_dir) const {
    std::ifstream file{path / run_dir / "metrics.jsonl"};
    std::vector<nlohmann::json> result;
    for (std::string line; std::getline(file, line) && !file.eof();)
      result.push_back(nlohmann::json::parse(line));
    return result;
  }

  uint64_t steps_done(const std::string& run_dir) const {
    auto all = lines(run_dir);
    if (all.empty())
      return 0;
    auto& last = all.back();
    return last.value("from_step", last.value("step", uint64_t{0}));
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

  void check_same_model(const std::string& run,
                        const std::string& other) const {
    CHECK(content_of(path / run / "model.safetensors")
          == content_of(path / other / "model.safetensors"));
  }

  /// Checks that each step follows another one, and that the last of each are
  /// those of the run in "whole".
  /// @param first the step before the first one
  /// @returns the restarts
  std::vector<nlohmann::json> check_metrics(const std::string& run,
                                            uint64_t first) const {
    std::vector<nlohmann::json> result;
    std::map<uint64_t, nlohmann::json> steps;
    auto at = first;
    for (auto& x : metrics(run)) {
      INFO(x.dump());
      if (x.contains("restart")) {
        result.push_back(x);
        CHECK(x["restart"] == result.size());
        CHECK(x["at_step"] == at + 1);
        CHECK(x["from_step"] <= at);
        at = x["from_step"];
        continue;
      }
      CHECK(x["step"] == ++at);
      // Where two attempts made a step, they made the same.
      if (auto before = steps.find(at); before != steps.end())
        CHECK(before->second["loss"] == x["loss"]);
      steps[at] = x;
    }
    auto whole = metrics("whole");
    REQUIRE(at == whole.size());
    for (auto& x : whole)
      if (uint64_t step = x["step"]; step > first) {
        INFO("step " << step);
        CHECK(steps[step]["loss"] == x["loss"]);
        CHECK(steps[step]["grad_norm"] == x["grad_norm"]);
        if (steps[step].contains("held_out_loss"))
          CHECK_FALSE(steps[step]["held_out_loss"].is_null());
      }
    return result;
  }

private:
  std::set<pid_t> seen_;
};

} // namespace smp::test
