// ctest: seconds=16 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/installed.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <sstream>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace fs = std::filesystem;

namespace {

const std::string tiny = tiny_gpt(4, 4, 8, R"([train]
steps = 3
log_interval = 1
eval_steps = 1
sample = 4
)");

struct tiny_run : train_dir {
  tiny_run() : train_dir(tiny) {
    // nop
  }

  /// The losses of a run with these settings.
  std::vector<double> losses(std::vector<std::string> settings,
                             const std::string& name) const {
    std::vector<std::string> arguments{"tiny.toml", "--run-dir", name};
    arguments.insert(arguments.end(), settings.begin(), settings.end());
    auto p = start(arguments);
    INFO(p.output());
    CHECK(p.join() == 0);
    std::vector<double> result;
    for (auto& step : metrics(name))
      result.push_back(step["loss"]);
    return result;
  }
};

size_t widest_line(const std::string& text) {
  size_t result = 0;
  std::istringstream in{text};
  for (std::string line; std::getline(in, line);)
    result = std::max(result, line.size());
  return result;
}

std::string plugin(const std::string& name) {
  return (fs::path{std::getenv("SMP_BIN_DIR")} / "../lib" / name)
    .lexically_normal();
}

} // namespace

// -- the command --------------------------------------------------------------

TEST_CASE_METHOD(tiny_run, "the command schedule draws a step",
                 "[apps][schedule]") {
  auto p = start(
    {"schedule", "tiny.toml", "--svg", "step.svg", "--json", "step.json"});
  INFO(p.output());
  REQUIRE(p.join() == 0);
  auto text = p.output();
  CHECK(widest_line(text) <= 80);
  CHECK(text.find('\x1b') == std::string::npos);
  for (auto part : {"   0  ", "   1  ", "bubble", "makespan", "live"})
    CHECK_THAT(text, ContainsSubstring(part));
  auto svg = content_of(path / "step.svg");
  CHECK(svg.starts_with("<svg "));
  CHECK_THAT(svg, ContainsSubstring("microbatch 3, backward"));
  auto json = nlohmann::json::parse(content_of(path / "step.json"));
  CHECK(json["microbatches"] == 4);
  CHECK(json["pipeline"] == "interleaved");
  REQUIRE(json["ranks"].size() == 2);
  CHECK(json["bubble"].get<double>() > 0);
  CHECK(json["bubble"].get<double>() < 1);
  double busy = 0;
  for (auto& x : json["ranks"])
    busy += x["busy"].get<double>();
  CHECK(json["bubble"].get<double>()
        == Catch::Approx(1 - busy / (2 * json["makespan"].get<double>())));
  CHECK_FALSE(fs::exists(path / "runs"));
}

TEST_CASE_METHOD(tiny_run, "a prediction says which calls it takes to wait",
                 "[apps][schedule]") {
  struct variant {
    std::vector<std::string> settings;
    const char* waits;
  };
  const std::string paper = "--smp.strategy=paper";
  const std::string placed = "--smp.auto_partition=false";
  for (auto& [settings, waits] : std::vector<variant>{
         {{paper}, "none, as callers only pass results on"},
         {{paper, "--smp.no_promises=[\"transformer\"]"},
          "in each phase, for results used at once, lists or state"},
         {{paper, "--smp.fast_mode=false"}, "all (smp.fast_mode = false)"},
         {{paper, "--smp.trace_device=none"},
          "assumed none, as no trace shows what callers do"},
         // What code does with a result counts wherever modules are.
         {{placed, "--smp.manual_partition={\"transformer.h.2\" = 1}"},
          "none, as callers only pass results on"},
         {{placed,
           "--smp.manual_partition={"
           "\"transformer.h.1.attn.c_attn\" = 1}"},
          "1 in each phase, for results used at once, lists or state"},
         {{placed, "--smp.trace_device=none"},
          "assumed none, as no trace shows what callers do"}}) {
    std::vector<std::string> arguments{"schedule", "tiny.toml", "--json",
                                       "step.json"};
    arguments.insert(arguments.end(), settings.begin(), settings.end());
    auto output = run(arguments);
    CHECK_THAT(output, ContainsSubstring("\ncalls that wait: ")
                         && ContainsSubstring(std::string{waits} + "\n"));
    CHECK(widest_line(output) <= 80);
    auto json = nlohmann::json::parse(content_of(path / "step.json"));
    CHECK_THAT(json["calls"].get<std::string>(), ContainsSubstring(waits));
  }
}

TEST_CASE_METHOD(tiny_run, "given times count instead of guessed ones",
                 "[apps][schedule]") {
  // A microbatch takes 2 s forward and twice that backward, wherever its blocks
  // are, and everything else takes no time.
  write("times.json", R"({"backward_ratio": 2, "others": 0, "modules": {
    "transformer.h.0": 0.5, "transformer.h.1": 0.5,
    "transformer.h.2": 0.5, "transformer.h.3": 0.5}})");
  auto p = start({"schedule", "tiny.toml", "--smp.times=times.json", "--json",
                  "step.json", "--smp.pipeline=simple"});
  INFO(p.output());
  REQUIRE(p.join() == 0);
  auto json = nlohmann::json::parse(content_of(path / "step.json"));
  double busy = 0;
  for (auto& x : json["ranks"])
    busy += x["busy"].get<double>();
  CHECK(busy == Catch::Approx(4 * 6));
  double first = 0;
  for (auto& x : json["tasks"])
    if (x["microbatch"] == 0)
      first += x["end"].get<double>() - x["begin"].get<double>();
  CHECK(first == Catch::Approx(6));
  write("times.json", R"({"others": 0, "modules": {"transformer.x.0": 1}})");
  CHECK_THAT(run({"schedule", "tiny.toml", "--smp.times=times.json"}, 2),
             ContainsSubstring("transformer.x.0"));
}

TEST_CASE_METHOD(tiny_run, "a bad list is refused with its first wrong task",
                 "[apps][schedule]") {
  std::vector<std::string> bad{
    "tiny.toml", "--smp.pipeline=list", "--smp.microbatches=2",
    "--smp.schedule.list=[[0, \"forward\"], [1, \"backward\"]]"};
  for (auto command : {"", "check", "schedule"}) {
    auto arguments = bad;
    if (*command)
      arguments.insert(arguments.begin(), command);
    auto p = start(arguments);
    INFO(command);
    CHECK(p.join() == 2);
    CHECK_THAT(p.output(), ContainsSubstring("smp.schedule.list[1] = [1, "
                                             "\"backward\"]"));
  }
  CHECK_FALSE(fs::exists(path / "runs"));
}

TEST_CASE_METHOD(tiny_run, "1,024 ranks are played in time",
                 "[apps][schedule]") {
  auto begin = std::chrono::steady_clock::now();
  auto output = run({"schedule", "tiny.toml", "--ranks", "1024",
                     "--model.layers=1024", "--model.width=2",
                     "--smp.microbatches=256", "--data.batch_size=256"});
  auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now()
                                               - begin);
  INFO(output);
  CHECK(seconds.count() < 60); // bench and docs have the figure
  CHECK_THAT(output, ContainsSubstring("more devices"));
}

// -- plug-ins -----------------------------------------------------------------

TEST_CASE_METHOD(tiny_run, "a faulty plug-in ends the run with its name",
                 "[apps][schedule][R34]") {
  struct expectation {
    const char* fault;
    const char* text;
  };
  for (auto [fault, text] : {expectation{"throws", "threw: on purpose"},
                             {"twice", "a second time"},
                             // When calls go on, and steps may run again.
                             {"later throws", "threw: on purpose"},
                             {"later twice", "a second time"}}) {
    auto output = run({"tiny.toml", "--run-dir", fault, "--smp.pipeline=actor",
                       "--smp.schedule.plugin=" + plugin("faulty_schedule.so"),
                       "--smp.schedule.name=faulty",
                       std::string{"--smp.schedule.options="} + fault},
                      3);
    CHECK_THAT(output, ContainsSubstring("schedule actor \"faulty\""));
    CHECK_THAT(output, ContainsSubstring(text));
    CHECK_THAT(output, ContainsSubstring("backward ready, microbatch 1"));
  }
}

TEST_CASE_METHOD(tiny_run, "a schedule that a plug-in lacks is refused",
                 "[apps][schedule]") {
  CHECK_THAT(run({"check", "tiny.toml", "--smp.pipeline=actor",
                  "--smp.schedule.plugin=" + plugin("faulty_schedule.so"),
                  "--smp.schedule.name=fautly"},
                 2),
             ContainsSubstring("it has \"faulty\""));
}

// -- the example --------------------------------------------------------------

TEST_CASE_METHOD(tiny_run, "the example builds outside of the tree and trains",
                 "[apps][schedule][install]") {
  installed_smp installed{path};
  fs::copy(source_file("examples/memory_aware_schedule"), path / "plugin");
  installed.build("plugin", "Release");
  // The installed program with the plug-in.
  std::vector<std::string> settings{
    "--smp.pipeline=actor",
    "--smp.schedule.plugin=plugin/build/memory_aware.so",
    "--smp.schedule.name=memory_aware", "--smp.schedule.options=limit_mb=100"};
  auto with = [&](std::vector<std::string> x) {
    x.insert(x.begin(), installed.prefix() + "/bin/smp-train");
    x.insert(x.end(), settings.begin(), settings.end());
    return x;
  };
  CHECK_THAT(installed.run(with({"check", "tiny.toml"})),
             ContainsSubstring("no errors"));
  CHECK_THAT(installed.run(with({"tiny.toml", "--run-dir", "actor"})),
             ContainsSubstring("schedule: actor, 4 microbatches"));
  auto reference = losses({}, "reference");
  std::istringstream lines{content_of(path / "actor" / "metrics.jsonl")};
  std::vector<double> mine;
  for (std::string line; std::getline(lines, line);)
    mine.push_back(nlohmann::json::parse(line)["loss"]);
  REQUIRE(mine.size() == reference.size());
  for (size_t i = 0; i < mine.size(); ++i)
    CHECK(mine[i] == Catch::Approx(reference[i]).epsilon(1e-4));
}
