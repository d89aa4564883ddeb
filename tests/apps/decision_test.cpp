// ctest: timeout=300 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/train_dir.hpp"

#include <set>
#include <string>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

/// A model whose times are far below what can be measured.
constexpr const char* small = R"([smp]
pipeline_parallel_degree = 2
microbatches = 4

[model]
type = "mlp"
layers = 6
width = 12
inputs = 12
outputs = 4

[data]
type = "synthetic"
batch_size = 8

[train]
steps = 1
eval_steps = 0
)";

struct decisions : train_dir {
  decisions() : train_dir(small) {
    // nop
  }

  std::string output_of(std::vector<std::string> arguments) const {
    auto p = start(std::move(arguments));
    auto code = p.join();
    INFO(p.output());
    REQUIRE(code == 0);
    return p.output();
  }
};

/// What is printed from `begin` on, up to the line with `end`.
std::string part_of(const std::string& text, const std::string& begin,
                    const std::string& end) {
  auto from = text.find(begin);
  REQUIRE(from != std::string::npos);
  auto to = text.find(end, from);
  REQUIRE(to != std::string::npos);
  return text.substr(from, to - from);
}

} // namespace

TEST_CASE_METHOD(decisions,
                 "Partition, schedule and training decide alike, time after "
                 "time, where times are noise",
                 "[apps][partition]") {
  std::set<std::string> partitions, predictions, times;
  for (int i = 0; i < 3; ++i) {
    partitions.insert(part_of(output_of({"partition", "tiny.toml"}),
                              "partition:", "memory: up to"));
    const auto run_dir = "run" + std::to_string(i);
    auto trained = output_of({"tiny.toml", "--run-dir", run_dir});
    times.insert(content_of(path / run_dir / "times.json"));
    partitions.insert(part_of(trained, "partition:", "schedule:"));
    predictions.insert(part_of(trained, "predicted bubble ", " %").substr(17));
    auto played = output_of({"schedule", "tiny.toml"});
    predictions.insert(part_of(played, "bubble ", " %").substr(7));
  }
  CHECK(partitions.size() == 1);
  CHECK_THAT(*partitions.begin(), ContainsSubstring("less than 1 ms forward"));
  CHECK(predictions.size() == 1);
  REQUIRE(times.size() == 1);
  // They can be used again.
  CHECK(part_of(output_of({"schedule", "tiny.toml", "--times",
                           (path / "run0/times.json").string()}),
                "makespan ", " (")
        == part_of(output_of({"schedule", "tiny.toml"}), "makespan ", " ("));
  const auto written = nlohmann::json::parse(*times.begin());
  double forward = 0;
  for (auto& x : written["modules"].items())
    forward += x.value().get<double>();
  CHECK(forward == Catch::Approx(1e-3));
}
