// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <regex>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace fs = std::filesystem;

namespace {

/// A run that takes a second.
const std::string tiny = tiny_gpt(2, 4, 8, R"([train]
steps = 2
eval_steps = 0
)");

struct run_dirs : train_dir {
  run_dirs() : train_dir(tiny) {
    // nop
  }

  /// Losses and norms of a run.
  std::vector<double> numbers(const std::string& run_dir) const {
    std::vector<double> result;
    for (auto& step : metrics(run_dir)) {
      result.push_back(step["loss"]);
      result.push_back(step["grad_norm"]);
    }
    return result;
  }
};

} // namespace

TEST_CASE_METHOD(run_dirs, "A run leaves the configuration that runs it again",
                 "[apps][train]") {
  auto first = start({"tiny.toml", "--run-dir", "first", "--ranks", "1",
                      "--train.steps=3", "--smp.seed=7"});
  REQUIRE(first.join() == 0);
  // Without where each key was set.
  auto config_in = [this](const char* dir) {
    return std::regex_replace(content_of(path / dir / "config.toml"),
                              std::regex{"  #[^\n]*"}, "");
  };
  auto written = config_in("first");
  for (auto text : {"pipeline_parallel_degree = 1\n", "steps = 3\n",
                    "seed = 7\n", "width = 16\n", "lr = 0.001\n"})
    CHECK_THAT(written, ContainsSubstring(text));
  // From elsewhere: its paths must not depend on where it lies.
  fs::create_directory(path / "elsewhere");
  program second{{built_program("smp-train"), "../first/config.toml",
                  "--run-dir", "../second"},
                 path / "elsewhere"};
  REQUIRE(second.join() == 0);
  CHECK(numbers("second").size() == 6);
  CHECK(numbers("second") == numbers("first"));
  CHECK(config_in("second") == written);
}

TEST_CASE_METHOD(run_dirs, "A directory that holds a run is left alone",
                 "[apps][train]") {
  const std::vector<std::string> arguments{"tiny.toml", "--run-dir", "out"};
  // What failed before its first step left nothing that counts.
  auto bad = arguments;
  bad.push_back("--smp.manual_partition={\"no.such\" = 1}");
  CHECK(start(bad, threads_as_ranks).join() == 2);
  REQUIRE(start(arguments, threads_as_ranks).join() == 0);
  auto before = content_of(path / "out/metrics.jsonl");
  for (auto what : {"train", "verify", "processes"}) {
    INFO(what);
    auto again = arguments;
    if (what == std::string{"verify"})
      again.insert(again.begin(), what);
    auto p = what == std::string{"processes"} ? start(again)
                                              : start(again, threads_as_ranks);
    CHECK(p.join() == 2);
    CHECK(p.output()
          == "smp-train: --run-dir out holds a run already "
             "(out/metrics.jsonl); give another directory or remove this "
             "one, or leave --run-dir out for a new one below runs/\n");
  }
  CHECK(content_of(path / "out/metrics.jsonl") == before);
}

TEST_CASE_METHOD(run_dirs, "No mode of several overwrites a run",
                 "[apps][verify]") {
  REQUIRE(start({"tiny.toml", "--run-dir", "out-fast"}, threads_as_ranks).join()
          == 0);
  auto config = content_of(path / "out-fast/config.toml");
  auto steps = content_of(path / "out-fast/metrics.jsonl");
  for (auto& environment : {threads_as_ranks, {}}) {
    INFO(environment.size());
    auto p = start({"verify", "tiny.toml", "--modes", "dynamic,fast",
                    "--run-dir", "out", "--steps=1", "--smp.seed=7"},
                   environment);
    CHECK(p.join() == 2);
    CHECK_THAT(p.output(),
               ContainsSubstring("--run-dir out-fast holds a run already"));
    // It is known before the first mode begins.
    CHECK_FALSE(fs::exists(path / "out-dynamic"));
  }
  CHECK(content_of(path / "out-fast/config.toml") == config);
  CHECK(content_of(path / "out-fast/metrics.jsonl") == steps);
  // One mode alone goes where it is told to, and `out` itself is not a mode's.
  fs::rename(path / "out-fast", path / "out");
  auto p = start({"verify", "tiny.toml", "--modes", "dynamic,fast", "--run-dir",
                  "out", "--steps=1"},
                 threads_as_ranks);
  CHECK(p.join() == 0);
  CHECK(content_of(path / "out/config.toml") == config);
}
