// ctest: seconds=15 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/inspected.hpp"
#include "tests/support/runs/processes.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

// smp-inspect RUN stack on real runs.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using nlohmann::json;

namespace {

/// Asks until `done`, which is expected soon.
template <class F>
inspected stack_until(const train_dir& dir, std::vector<std::string> words,
                      F done) {
  words.insert(words.begin(), "stack");
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  for (;;) {
    auto x = ask_run(dir, words);
    if (done(x) || std::chrono::steady_clock::now() > end)
      return x;
  }
}

/// What `data.type = "safetensors"` reads: input0 [8, 8] and input1 [8], zeros.
std::string batch() {
  std::string head = R"({"input0":{"dtype":"F32","shape":[8,8],)"
                     R"("data_offsets":[0,256]},"input1":{"dtype":"F32",)"
                     R"("shape":[8],"data_offsets":[256,288]}})";
  head.resize((head.size() + 7) / 8 * 8, ' ');
  std::string result(8, '\0');
  result[0] = static_cast<char>(head.size());
  return result + head + std::string(288, '\0');
}

const std::string looping = R"([smp]
pipeline_parallel_degree = 2
microbatches = 2
auto_partition = false
manual_partition = {"part" = 1}

[model]
type = "plugin"
library = "LIBRARY"
name = "net"

[data]
type = "safetensors"
path = "batch.safetensors"
batch_size = 4

[train]
steps = 1000000
log_interval = 1
)";

std::vector<double> losses_of(const train_dir& dir, size_t steps) {
  std::vector<double> result;
  for (auto& x : dir.metrics("run"))
    if (result.size() < steps)
      result.push_back(x.at("loss").get<double>());
  return result;
}

} // namespace

TEST_CASE("The stack of a rank names the function that loops for ever",
          "[apps][stack]") {
  train_dir dir{with_library(looping, "model_with_fault_points")};
  dir.write("batch.safetensors", batch());
  auto run = dir.start(
    {"tiny.toml", "--run-dir", "run"},
    {{"LD_PRELOAD", built_program("../lib/smp_fault_point.so")},
     {"SMP_TEST_FAULT", "loop forward 1 5"}});
  // In code of LibTorch's, or before it begins, it is somewhere else.
  const std::string function = "::fail(..)"; // as "loop" says
  auto x = stack_until(dir, {"1"}, [&](auto& y) {
    return y.output.find(function) != y.output.npos;
  });
  INFO(x.output);
  CHECK_THAT(x.output, ContainsSubstring(function)
                         && ContainsSubstring("failing_impl::forward(..)")
                         && ContainsSubstring("rank 1, process ")
                         && ContainsSubstring("  main thread ")
                         && !ContainsSubstring("rank 0, process "));
  // All ranks, in full.
  auto all = stack_until(dir, {"--json"}, [](auto& y) { return y.code == 0; });
  auto stacks = json::parse(all.output).at("stacks");
  REQUIRE(stacks.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    CHECK(stacks.at(i).at("rank") == i);
    auto main = stacks.at(i).at("threads").at(0);
    CHECK(main.at("ids").at(0) == stacks.at(i).at("pid"));
    CHECK(main.at("problem") == "");
    CHECK(main.at("frames").size() > 3);
  }
  auto none = ask_run(dir, {"stack", "2"});
  CHECK(none.code == 2);
  CHECK_THAT(none.output,
             ContainsSubstring("run: no rank 2; its ranks are 0 to 1"));
  REQUIRE(::kill(stacks.at(1).at("pid").get<pid_t>(), SIGSTOP) == 0);
  auto stopped = stack_until(dir, {"1"}, [](auto& y) {
    return y.output.find("rank 1 is stopped: ") != y.output.npos;
  });
  CHECK(stopped.code == 1);
  CHECK_THAT(stopped.output, ContainsSubstring("rank 1 is stopped: "));
  REQUIRE(::kill(stacks.at(1).at("pid").get<pid_t>(), SIGKILL) == 0);
  REQUIRE(run.join() == 3);
  auto over = ask_run(dir, {"stack", "1"});
  CHECK(over.code == 3);
  CHECK_THAT(over.output, ContainsSubstring("only a live rank has stacks"));
}

TEST_CASE("A run that is asked for its stacks learns what it would have",
          "[apps][stack]") {
  train_dir dir{endless_gpt()};
  std::vector<double> losses;
  for (auto asked : {true, false}) {
    std::filesystem::remove_all(dir.path / "run");
    auto run = dir.start(
      {"tiny.toml", "--run-dir", "run", "--smp.deterministic_server=true"});
    REQUIRE(run.wait_for(" 2/1000000"));
    if (asked) {
      for (int answers = 0; answers < 20;) {
        auto x = ask_run(dir, {"stack", "--json"});
        // A rank can be late.
        INFO(x.output);
        REQUIRE((x.code == 0 || x.code == 1));
        answers += x.code == 0 ? 1 : 0;
      }
      losses = losses_of(dir, SIZE_MAX);
      CHECK(losses.size() > 5);
    } else {
      REQUIRE(run.wait_for(fmt::format("{}/1000000", losses.size() + 1)));
      CHECK(losses_of(dir, losses.size()) == losses);
    }
    run.signal(SIGINT);
    CHECK(run.join() == 130);
  }
}
