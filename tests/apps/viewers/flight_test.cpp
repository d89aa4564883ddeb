// ctest: seconds=15 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/inspected.hpp"
#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/torchrun.hpp"

#include <nlohmann/json.hpp>

#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

// What ranks did: traces, and the records that a run leaves.

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace smp::test;
using nlohmann::json;

namespace {

/// @returns the events of the ranks, by rank
std::map<uint64_t, std::set<std::string>> kinds_of(const json& flight) {
  std::map<uint64_t, std::set<std::string>> result;
  for (auto& x : flight.at("events"))
    result[x.at("rank").get<uint64_t>()].insert(x.at("kind"));
  return result;
}

struct trace_counts {
  std::set<int> steps;
  std::map<std::string, int> arrows; // "s request", "f request", ...
  std::map<std::string, int> kinds;  // of slices
};

trace_counts counts_of(const std::filesystem::path& file) {
  trace_counts result;
  auto trace = json::parse(content_of(file));
  for (auto& x : trace.at("traceEvents")) {
    auto what = x.at("ph").get<std::string>();
    if (what == "s" || what == "f")
      ++result.arrows[what + ' ' + x.at("name").get<std::string>()];
    if (what == "C")
      ++result.kinds["memory"];
    if (what != "X")
      continue;
    auto& args = x.at("args");
    if (args.contains("kind"))
      ++result.kinds[args.at("kind")];
    if (x.at("cat") == "step")
      result.steps.insert(args.at("step").get<int>());
  }
  return result;
}

void check_arrows(const trace_counts& x, int requests) {
  for (auto* arrow : {"s request", "f request", "s reply", "f reply"}) {
    INFO(arrow);
    CHECK(x.arrows.at(arrow) == requests);
  }
}

} // namespace

TEST_CASE(
  "Ranks tell what they did last, and a run whose rank is killed leaves "
  "it, also of that rank",
  "[apps][flight]") {
  train_dir dir{endless_gpt()};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 5/1000000"));
  auto live = ask_run(dir, {"flight", "--last", "2000", "--json"});
  INFO(live.output);
  auto x = json::parse(live.output).at("flight");
  REQUIRE(x.at("ranks").size() == 2);
  CHECK_THAT(ask_run(dir, {"health"}).output,
             ContainsSubstring("\nrank 1    well "));
  auto kinds = kinds_of(x);
  for (auto* kind : {"asks", "answer came", "executes", "ended", "step begins",
                     "admitted", "begins"})
    CHECK(kinds[0].count(kind) == 1);
  for (auto* kind : {"request came", "executes", "ended", "answers"})
    CHECK(kinds[1].count(kind) == 1);
  CHECK(!std::filesystem::exists(dir.path / "run/flight-0"));

  run.signal(SIGQUIT);
  CHECK(
    run.wait_for("smp: SIGQUIT: what each rank did last is in "
                 "run/flight-0"));
  CHECK(std::filesystem::exists(dir.path / "run/flight-1"));
  auto ranks = json::parse(ask_run(dir, {"ls", "--json"}).output);
  for (auto& y : ranks.at("actors"))
    if (y.at("id") == "r1")
      ::kill(std::stoi(y.at("items").at("process").get<std::string>()),
             SIGKILL);
  REQUIRE(run.join() == 3);
  auto left = ask_run(dir, {"flight", "--rank", "1", "--last", "3"});
  CHECK(left.code == 3);
  CHECK_THAT(left.output, ContainsSubstring("rank 1: killed by signal 9")
                            && ContainsSubstring("\nrank 1:")
                            && ContainsSubstring("  r1 ")
                            && !ContainsSubstring("\nrank 0:"));
  auto both = ask_run(dir, {"flight", "--json"});
  CHECK(json::parse(both.output).at("flight").at("ranks").size() == 2);

  auto partition = ask_run(dir, {"partition"});
  CHECK(partition.code == 0);
  CHECK_THAT(partition.output, ContainsSubstring("\n  transformer ")
                                 && ContainsSubstring("\nload of   0 "));
  auto nodes = json::parse(ask_run(dir, {"partition", "--json"}).output);
  std::set<int> devices;
  for (auto& node : nodes.at("nodes"))
    devices.insert(node.at("device").get<int>());
  CHECK(devices == std::set<int>{0, 1});
  CHECK_THAT(ask_run(dir, {"waits"}).output,
             !ContainsSubstring("its last stall"));
}

TEST_CASE("A stall leaves what each rank did last, also of a stopped one",
          "[apps][flight]") {
  train_dir dir{endless_gpt("[monitor]\nstall_timeout = 1\n")};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ranks = json::parse(ask_run(dir, {"ls", "--json"}).output);
  pid_t stopped = 0;
  for (auto& y : ranks.at("actors"))
    if (y.at("id") == "r1")
      stopped = std::stoi(y.at("items").at("process").get<std::string>());
  REQUIRE(stopped > 0);
  ::kill(stopped, SIGSTOP);
  REQUIRE(run.wait_for("smp: "));
  // It does not answer, so this is from its file.
  auto x = ask_run(dir, {"flight", "--rank", "1", "--last", "3"});
  CHECK(x.code == 1);
  CHECK_THAT(x.output, ContainsSubstring("  r1 "));
  ::kill(stopped, SIGKILL);
  REQUIRE(run.join() == 3);
  // Nobody answers any more.
  auto waits = ask_run(dir, {"waits"});
  CHECK(waits.code == 3);
  CHECK_THAT(waits.output, ContainsSubstring("\nits last stall: ")
                             && ContainsSubstring("rank 1"));
  CHECK(!json::parse(ask_run(dir, {"waits", "--json"}).output)
           .at("waits")
           .at("all")
           .empty());
}

TEST_CASE("Ranks of another launcher write their records themselves",
          "[apps][flight]") {
  train_dir dir{endless_gpt()};
  auto ranks = start_as_torchrun(
    dir, {"tiny.toml", "--run-dir", "run", "--monitor.trace=3"});
  REQUIRE(ranks[0]->wait_for(" 5/1000000"));
  CHECK(counts_of(dir.path / "run/trace.json").steps == std::set<int>{3});
  ranks[1]->signal(SIGKILL);
  CHECK(ranks[0]->join() == 3);
  auto x = ask_run(dir, {"flight", "--last", "5"});
  CHECK_THAT(x.output,
             ContainsSubstring("\nrank 0:") && ContainsSubstring("  r0 "));
}

TEST_CASE("A run that goes on is traced from outside", "[apps][flight]") {
  train_dir dir{endless_gpt()};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto x = ask_run(dir, {"trace", "--steps", "2", "--output", "t.json"});
  INFO(x.output);
  CHECK(x.code == 0);
  auto counts = counts_of(dir.path / "t.json");
  REQUIRE(counts.steps.size() == 2);
  // Two microbatches, forward and backward of one call.
  check_arrows(counts, 2 * 2 * 2);
  CHECK(counts.kinds["module"] > 0);
  CHECK(counts.kinds["memory"] > 0);

  run.signal(SIGINT);
  REQUIRE(run.join() == 130);
  auto none = ask_run(dir, {"trace"});
  CHECK(none.code == 2);
  CHECK_THAT(none.output, ContainsSubstring("only a run that answers"));
  CHECK_THAT(ask_run(dir, {"flight"}).output,
             ContainsSubstring("there is no record of what ranks did last"));
}

TEST_CASE(
  "monitor.trace keeps the steps that it names, as training counts them",
  "[apps][flight]") {
  train_dir dir{tiny_gpt(2, 2, 4, R"([train]
steps = 6
eval_interval = 2
eval_steps = 1
)")};
  auto run = dir.start(
    {"tiny.toml", "--run-dir", "run", "--monitor.trace=4-5"});
  run.finish();
  CHECK_THAT(run.output(),
             ContainsSubstring("smp: steps 4 to 5 are in run/trace.json"));
  auto counts = counts_of(dir.path / "run/trace.json");
  CHECK(counts.steps == std::set<int>{0, 4, 5}); // 0: the evaluation after 4
  // Of the evaluation forward only; it has as many microbatches.
  check_arrows(counts, 2 * 2 * 2 + 2);
  CHECK(counts.kinds["planned"] > 0);

  auto settings = json::parse(ask_run(dir, {"config", "--json"}).output);
  CHECK(settings.at("monitor.trace").at("value") == "\"4-5\"");
  CHECK(settings.at("monitor.trace").at("origin") == "command line");
  CHECK(settings.at("train.steps").at("value") == "6");
  auto line = settings.at("train.steps").at("origin").get<std::string>();
  CHECK_THAT(line, StartsWith("tiny.toml:"));
  CHECK(settings.at("optimizer.type").at("origin") == "default");
  CHECK(settings.at("smp.memory_weight").at("origin") == "other keys");
  CHECK_THAT(ask_run(dir, {"config"}).output,
             ContainsSubstring("train.eval_interval"));

  for (auto& [steps, why] : std::map<std::string, std::string>{
         {"5-4", "names no steps"},
         {"some", "names no steps"},
         {"0", "names no steps"},
         {"7", "goes beyond train.steps = 6"}}) {
    auto refused = dir.start(
      {"tiny.toml", "--run-dir", "other", "--monitor.trace=" + steps});
    CHECK_THAT(refused.finish(2),
               ContainsSubstring("monitor.trace") && ContainsSubstring(why));
  }
}
