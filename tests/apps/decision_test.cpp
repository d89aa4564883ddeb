// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <filesystem>
#include <set>
#include <string>

namespace fs = std::filesystem;
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
    partitions.insert(
      part_of(run({"partition", "tiny.toml"}), "partition:", "memory, MB"));
    const auto run_dir = "run" + std::to_string(i);
    auto trained = run({"tiny.toml", "--run-dir", run_dir});
    times.insert(content_of(path / run_dir / "times.json"));
    partitions.insert(part_of(trained, "partition:", "schedule:"));
    predictions.insert(part_of(trained, "predicted bubble ", " %").substr(17));
    auto played = run({"schedule", "tiny.toml"});
    predictions.insert(part_of(played, "bubble ", " %").substr(7));
  }
  CHECK(partitions.size() == 1);
  CHECK_THAT(*partitions.begin(), ContainsSubstring("less than 1 ms forward"));
  CHECK(predictions.size() == 1);
  REQUIRE(times.size() == 1);
  // They can be used again.
  CHECK(part_of(run({"schedule", "tiny.toml", "--smp.times=run0/times.json"}),
                "makespan ", " (")
        == part_of(run({"schedule", "tiny.toml"}), "makespan ", " ("));
  const auto written = nlohmann::json::parse(*times.begin());
  double forward = 0;
  for (auto& x : written["modules"].items())
    forward += x.value()["seconds"].get<double>();
  CHECK(forward == Catch::Approx(1e-3));
}

TEST_CASE_METHOD(decisions, "Stored times decide, whoever stored them",
                 "[apps][partition]") {
  // Nobody would measure this: all but the first two layers take next to
  // nothing, so that these are on two ranks.
  run({"partition", "tiny.toml", "--json", "plan.json"});
  auto plan = nlohmann::json::parse(content_of(path / "plan.json"));
  auto& modules = plan["modules"];
  REQUIRE(modules.is_object());
  for (auto& x : modules)
    x["seconds"] = 1e-3;
  for (auto name : {"layers.0", "layers.2"})
    modules.at(name)["seconds"] = 2.5;
  write("given.json", plan.dump());
  const std::string balance = "--smp.memory_weight=0";
  auto modules_of = [](const std::string& text) {
    return part_of(text, "  module ", "load of");
  };
  std::set<std::string> partitions, predictions, times;
  for (std::string file : {"given.json", "run0/times.json", "again.json"}) {
    const auto from = "--smp.times=" + file;
    partitions.insert(modules_of(
      run({"partition", "tiny.toml", from, balance, "--json", "again.json"})));
    predictions.insert(
      part_of(run({"schedule", "tiny.toml", from, balance}), "bubble ", " %")
        .substr(7));
    fs::remove_all(path / "next");
    auto trained = run({"tiny.toml", "--run-dir", "next", from, balance});
    partitions.insert(modules_of(trained));
    predictions.insert(part_of(trained, "predicted bubble ", " %").substr(17));
    times.insert(content_of(path / "next/times.json"));
    if (file == "given.json")
      fs::rename(path / "next", path / "run0");
  }
  CHECK_FALSE(
    partitions.contains(modules_of(run({"partition", "tiny.toml", balance}))));
  CHECK(partitions.size() == 1);
  CHECK(predictions.size() == 1);
  REQUIRE(times.size() == 1);
  CHECK(nlohmann::json::parse(*times.begin())["modules"] == modules);
  // The configuration of a run finds them from where it lies.
  CHECK_THAT(content_of(path / "run0/config.toml"),
             ContainsSubstring("given.json"));
}

TEST_CASE_METHOD(decisions, "Times of another model are refused by module",
                 "[apps][partition]") {
  run({"partition", "tiny.toml", "--json", "plan.json"});
  const std::string times = "--smp.times=plan.json";
  const std::vector<std::pair<std::string, std::string>> others{
    {"--model.layers=7", "layers.10 has 156 parameters of its own, and 52"},
    {"--model.layers=5", "layers.8 has 52 parameters of its own, and 156"},
    {"--model.width=10", "parameters of its own, and"}};
  for (auto& [change, why] : others)
    for (std::string command : {"check", "partition", "schedule", "train"}) {
      std::vector<std::string> arguments{command, "tiny.toml", times, change};
      if (command == "train")
        arguments.erase(arguments.begin());
      auto p = start(arguments);
      auto code = p.join();
      INFO(command << " " << change << ": " << p.output());
      CHECK(code == 2);
      CHECK_THAT(p.output(), ContainsSubstring("plan.json is of another model")
                               && ContainsSubstring(why));
    }
}

TEST_CASE_METHOD(decisions, "Times that lack or add a module are refused",
                 "[apps][partition]") {
  run({"partition", "tiny.toml", "--json", "plan.json"});
  const auto plan = nlohmann::json::parse(content_of(path / "plan.json"));
  auto less = plan, more = plan, partly = plan;
  less["modules"].erase("layers.4");
  more["modules"]["layers.12"] = 0.1;
  partly["modules"].erase("layers.4");
  partly["others"] = 0.1;
  const std::vector<std::pair<std::string, std::string>> files{
    {less.dump(), "layers.4 has no time there"},
    {more.dump(), "this one has no module 'layers.12'"},
    {R"({"nodes": []})", "it has no times of modules"}};
  for (auto& [text, why] : files) {
    write("other.json", text);
    CHECK_THAT(run({"partition", "tiny.toml", "--smp.times=other.json"}, 2),
               ContainsSubstring("other.json") && ContainsSubstring(why));
  }
  write("other.json", partly.dump());
  run({"partition", "tiny.toml", "--smp.times=other.json"});
}
