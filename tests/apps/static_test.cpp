// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <vector>

// A TorchScript model whose flow depends on data diverges from its record, over
// processes (R33): one that leaves a loop over its levels as soon as it is
// sure, which it learns to be.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

constexpr const char* early_exit = R"([smp]
pipeline_parallel_degree = 2
microbatches = 4
threads = 1
strategy = "paper"  # a model so small would pay best on one rank
memory_weight = 1.0
trace_device = "none"

[model]
type = "torchscript"
path = "{file}.pt"

[data]
type = "safetensors"
path = "{file}.batch.safetensors"

[optimizer]
type = "sgd"
lr = 0.1

[train]
steps = 12
)";

struct exit_run : train_dir {
  exit_run()
    : train_dir(
      fmt::format(fmt::runtime(early_exit),
                  fmt::arg("file", source_file("tests/data/zoo/early_exit")))) {
    // nop
  }

  /// @returns the steps that metrics.jsonl has, after a run that ended well
  std::vector<nlohmann::json> steps(std::vector<std::string> settings,
                                    const std::string& name) const {
    if (!settings.empty()) // they replay
      settings.push_back("--smp.static_steps=1");
    settings.insert(settings.begin(), {"tiny.toml", "--run-dir", name});
    run(settings);
    return metrics(name);
  }
};

} // namespace

TEST_CASE_METHOD(exit_run,
                 "Steps that diverge from their record fall back, are "
                 "counted, and have the numbers of dynamic ones",
                 "[apps][static][R33]") {
  auto fast = GENERATE(as<std::string>{}, "auto", "false", "true");
  auto dynamic = steps({}, "dynamic");
  auto replays = steps({"--smp.static_mode=true", "--smp.fast_mode=" + fast},
                       "static");
  REQUIRE(replays.size() == dynamic.size());
  auto kinds = [&](const char* kind) {
    return std::count_if(replays.begin(), replays.end(),
                         [&](auto& x) { return x["static"] == kind; });
  };
  CHECK(kinds("record") >= 1);
  CHECK(kinds("replay") >= 1);
  CHECK(kinds("fallback") >= 1);
  CHECK(kinds("record") + kinds("replay") + kinds("fallback") == 12);
  for (size_t i = 0; i < dynamic.size(); ++i)
    CHECK(replays[i]["loss"].get<double>()
          == Catch::Approx(dynamic[i]["loss"].get<double>()).epsilon(1e-4));
}

TEST_CASE_METHOD(exit_run, "Verify compares fallbacks and counts them",
                 "[apps][static][verify][R33]") {
  auto output = run({"verify", "tiny.toml", "--run-dir", "run", "--json",
                     "out.json", "--steps", "12", "--smp.static_mode=true",
                     "--smp.static_steps=1"});
  auto json = nlohmann::json::parse(content_of(path / "out.json"));
  // In one of them it is compiled, and up to three more learn what its calls
  // return.
  CHECK(json["recorded"].get<int>() >= 2);
  CHECK(json["recorded"].get<int>() <= 5);
  CHECK(json["fell_back"].get<int>() >= 1);
  CHECK(json["recorded"].get<int>() + json["replayed"].get<int>()
          + json["fell_back"].get<int>()
        == 12);
  CHECK_THAT(output, ContainsSubstring(" diverged from the record)"));
}
