#pragma once

// What runs leave behind that were started again, or were not.

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace smp::test {

struct recorded_runs : train_dir {
  using train_dir::train_dir;

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
};

} // namespace smp::test
