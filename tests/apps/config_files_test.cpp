// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

// The configurations that ship train.

using namespace smp::test;

namespace fs = std::filesystem;

namespace {

std::vector<std::string> shipped_models() {
  std::vector<std::string> result;
  for (auto& file : fs::directory_iterator{source_file("config/models")})
    result.push_back(file.path().filename());
  std::sort(result.begin(), result.end());
  return result;
}

} // namespace

TEST_CASE("Each model that ships has a configuration of its own",
          "[apps][config]") {
  CHECK(shipped_models()
        == std::vector<std::string>{"bert.toml", "gpt3.toml", "mlp.toml",
                                    "moe.toml", "ncf.toml", "roberta.toml",
                                    "t5.toml"});
}

TEST_CASE("Each configuration that ships trains", "[apps][config]") {
  train_dir dir{""};
  auto name = GENERATE(as<std::string>{}, "bert", "gpt3", "mlp", "moe", "ncf",
                       "roberta", "t5");
  CAPTURE(name);
  dir.run({source_file("config/models/" + name + ".toml"), "--run-dir", "run",
           "--train.steps=3", "--train.eval_steps=1",
           "--train.log_interval=1"});
  auto steps = dir.metrics("run");
  REQUIRE(steps.size() == 3);
  for (auto& step : steps) {
    CHECK(std::isfinite(step["loss"].get<double>()));
    CHECK(step["grad_norm"].get<double>() > 0);
  }
  CHECK(steps[2]["loss"] != steps[0]["loss"]);
}

TEST_CASE("Each configuration that ships has the numbers of one process",
          "[apps][config][R35]") {
  train_dir dir{""};
  auto name = GENERATE(as<std::string>{}, "bert", "gpt3", "mlp", "moe", "ncf",
                       "roberta", "t5");
  CAPTURE(name);
  dir.run(
    {"verify", source_file("config/models/" + name + ".toml"), "--steps", "1"});
}
