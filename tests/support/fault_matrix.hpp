#pragma once

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <chrono>
#include <filesystem>
#include <list>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <unistd.h>

// A rank of smp-train fails in one of several ways, at one of several places.

namespace smp::test {

/// Forty steps, a checkpoint and an evaluation after each ten of them.
inline const std::string run_with_fault_points = R"([smp]
pipeline_parallel_degree = 2
microbatches = 2
auto_partition = false

[model]
type = "plugin"
library = "LIBRARY"
name = "net"

[data]
type = "safetensors"
path = "batch.safetensors"
held_out = 0.5
batch_size = 4

[optimizer]
type = "sgd"
lr = 1e-3

[train]
steps = 40
log_interval = 1
eval_interval = 10
eval_steps = 1

[checkpoint]
dir = "checkpoints"
interval = 10
keep = 9

[monitor]
on_stall = "end"
)";

/// What is to be seen of a fault.
struct fault_row {
  std::string kind, phase;
  int code;
  std::string culprit;        // on the console; {} is the rank
  bool restarts = true;       // with train.max_restarts
  std::string of_rank_0 = {}; // instead, as the step body calls the module
};

/// Left out, as there is no such thing: code of a user that loops or throws
/// while smp writes a checkpoint, or loops in an optimizer of LibTorch.
inline std::vector<fault_row> fault_matrix() {
  const std::string made = "cannot be created: ";
  const std::string in_step = "smp-train: rank {}, module part: ";
  const std::string no_memory = "no more memory (std::bad_alloc)";
  const std::string loops = "rank {} executes module part, microbatch ";
  const std::vector<std::pair<std::string, std::string>> thrown{
    {"throw", "on purpose"}, {"memory", "std::bad_alloc"}};
  std::vector<fault_row> result{
    {"throw", "start-up", 3, made + "on purpose", false},
    {"throw", "optimizer", 3, "smp-train: on purpose"},
    {"memory", "start-up", 3, made + "std::bad_alloc", false},
    {"memory", "optimizer", 2, "smp-train: " + no_memory, false},
    {"memory", "checkpoint", 2, "smp-train: rank {}: " + no_memory, false},
    {"loop", "start-up", 4, "rank {} executes user code outside of a step"},
    {"disk", "checkpoint", 2, "/disk/checkpoints/step-20/", false}};
  for (std::string phase : {"forward", "backward", "evaluation"}) {
    // LibTorch's engine runs the backward code of the whole step body.
    auto own = [&](const std::string& text) {
      return phase == "backward" ? "smp-train: rank 0: " + text : "";
    };
    for (auto& [kind, text] : thrown)
      result.push_back({kind, phase, 3, in_step + text, true, own(text)});
    result.push_back({"loop", phase, 4, loops, true, "; rank 0 executes "});
  }
  const std::vector<std::string> phases{
    "start-up", "forward", "backward", "optimizer", "checkpoint", "evaluation"};
  for (auto& phase : phases) {
    result.push_back(
      {"kill", phase, 3, "rank {}: killed by signal 9 (SIGKILL)"});
    result.push_back(
      {"abort", phase, 3, "rank {}: killed by signal 6 (SIGABRT)"});
    result.push_back({"stop", phase, 4, "rank {} has not answered for "});
    result.push_back(
      {"actors", phase, 4, "rank {}'s actors do not answer", true, "; rank 0"});
    if (phase != "checkpoint") // the disk of the run's directory
      result.push_back({"disk", phase, 2,
                        "disk/run/metrics.jsonl: No space left on device",
                        false});
  }
  return result;
}

/// One run with one fault.
class faulty_run {
public:
  /// @param restarts train.max_restarts
  faulty_run(const fault_row& row, int rank, int restarts)
    : row_(row), rank_(rank), restarts_(restarts), run_(start()) {
    // nop
  }

  /// Waits for the end of the run and looks at what is left.
  void check() {
    auto code = run_.join();
    auto& output = run_.output();
    INFO(fmt::format("{} in {} of rank {}, max_restarts = {}\n{}", row_.kind,
                     row_.phase, rank_, restarts_, output));
    if (output.find("unshare: ") != output.npos) {
      WARN("only root may mount: " << output);
      return;
    }
    REQUIRE(std::filesystem::exists(dir_.path / "fault"));
    const bool again = restarts_ > 0 && row_.restarts;
    CHECK(code == (again ? 0 : row_.code));
    const bool own = rank_ == 0 && !row_.of_rank_0.empty();
    CHECK_THAT(output, Catch::Matchers::ContainsSubstring(
                         own ? row_.of_rank_0
                             : fmt::format(fmt::runtime(row_.culprit), rank_)));
    // Rank 0 writes on the console itself.
    if (row_.culprit.find("{}") == std::string::npos && row_.kind != "disk"
        && rank_ > 0)
      CHECK_THAT(output,
                 Catch::Matchers::ContainsSubstring(fmt::format(
                   "rank {}: exited with code {}: ", rank_, row_.code)));
    if (again) { // the line that says so names the rank, too
      auto end = output.find("; restart 1 of 1 in ");
      REQUIRE(end != std::string::npos);
      auto begin = output.rfind("\nsmp: ", end);
      CHECK_THAT(
        output.substr(begin, end - begin),
        Catch::Matchers::ContainsSubstring(fmt::format("rank {}", rank_)));
    }
    check_end(again);
    check_nothing_left();
    if (!again)
      check_flight();
  }

private:
  program start() {
    smp::write_safetensors(
      dir_.path / "batch.safetensors",
      {{"input0", torch::ones({16, 8})}, {"input1", torch::ones({16})}});
    std::filesystem::create_directory(dir_.path / "shm");
    std::filesystem::create_directory(dir_.path / "disk");
    std::vector<std::string> command;
    if (row_.kind == "disk")
      command = {"unshare", "-m", "sh", "-c",
                 "mount -t tmpfs -o size=32m tmpfs disk && \"$0\" \"$@\"; "
                 "code=$?; rm disk/filler; cp -r disk/* .; exit $code"};
    std::string run_dir = runs_on_disk() ? "disk/run" : "run";
    std::string checkpoints = row_.kind == "disk" && !runs_on_disk()
                                ? "disk/checkpoints"
                                : "checkpoints";
    const bool stalls = row_.code == 4;
    command.insert(
      command.end(),
      {built_program("smp-train"), "tiny.toml", "--run-dir", run_dir,
       "--checkpoint.dir=" + checkpoints,
       fmt::format("--smp.manual_partition={{\"part\" = {}}}", rank_),
       fmt::format("--smp.default_partition={}", 1 - rank_),
       fmt::format("--monitor.stall_timeout={}", stalls ? 6 : 60),
       fmt::format("--train.max_restarts={}", restarts_)});
    return program{std::move(command),
                   dir_.path,
                   {{"LD_PRELOAD", built_program("../lib/smp_fault_point.so")},
                    {"SMP_TEST_FAULT", fmt::format("{} {} {} {}", row_.kind,
                                                   row_.phase, rank_, time())},
                    {"UCX_POSIX_DIR", dir_.path / "shm"}}};
  }

  /// Then there is no room for the records, either.
  bool runs_on_disk() const {
    return row_.kind == "disk" && row_.phase != "checkpoint";
  }

  /// After the first checkpoint, where that can be.
  int time() const {
    static const std::map<std::string, int> times{
      {"start-up", 1},   {"forward", 50},   {"backward", 50},
      {"optimizer", 25}, {"checkpoint", 1}, {"evaluation", 3}};
    return times.at(row_.phase);
  }

  /// The bound is far from what it takes, and from waiting for ever.
  void check_end(bool again) const {
    namespace fs = std::filesystem;
    auto file = dir_.path / "run/end.json";
    if (!runs_on_disk()) {
      auto end = nlohmann::json::parse(content_of(file));
      CHECK(end["restarts"] == (again ? 1 : 0));
      CHECK(end["exit_code"] == (again ? 0 : row_.code));
    }
    CHECK(fs::last_write_time(file) - fs::last_write_time(dir_.path / "fault")
          < std::chrono::seconds{again ? 60 : 30});
    if (row_.phase != "start-up")
      CHECK(fs::exists(dir_.path / "checkpoints/step-10"));
  }

  void check_nothing_left() const {
    std::error_code gone;
    for (auto& x : std::filesystem::directory_iterator{"/proc"})
      CHECK(std::filesystem::read_symlink(x.path() / "cwd", gone) != dir_.path);
    CHECK(std::filesystem::is_empty(dir_.path / "shm"));
    for (auto& x : std::filesystem::recursive_directory_iterator{dir_.path})
      CHECK(x.path().string().find(".partial-") == std::string::npos);
  }

  void check_flight() const {
    program x{{built_program("smp-inspect"), "run", "flight", "--json"},
              dir_.path};
    auto code = x.join();
    INFO(x.output());
    if (runs_on_disk()) {
      CHECK_THAT(run_.output(), Catch::Matchers::ContainsSubstring(
                                  "cannot write what ranks did last: "
                                  "disk/run/flight-0: No space left"));
      return;
    }
    CHECK(code == 3);
    auto flight = nlohmann::json::parse(x.output()).at("flight");
    CHECK(flight.at("ranks").size() == 2);
    std::set<int> seen;
    for (auto& y : flight.at("events"))
      seen.insert(y.at("rank").get<int>());
    CHECK(seen.size() == 2);
  }

  fault_row row_;
  int rank_;
  int restarts_;
  train_dir dir_{
    with_library(run_with_fault_points, "model_with_fault_points")};
  program run_;
};

/// One of several, side by side: most of what they do is wait.
struct fault_case {
  fault_row row;
  int rank = 1;
  int restarts = 0;
};

inline void check_faults(const std::vector<fault_case>& cases) {
  constexpr size_t at_once = 4;
  std::list<faulty_run> running;
  for (auto& x : cases) {
    if (running.size() == at_once) {
      running.front().check();
      running.pop_front();
    }
    running.emplace_back(x.row, x.rank, x.restarts);
  }
  for (auto& x : running)
    x.check();
}

} // namespace smp::test
