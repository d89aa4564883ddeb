// ctest: timeout=300 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/train_dir.hpp"

#include <nlohmann/json.hpp>

#include <csignal>
#include <filesystem>
#include <string>

// smp-train names a stall, ends with 4 and leaves no process behind.

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace smp::test;

namespace {

/// A run that takes minutes.
constexpr const char* tiny = R"([smp]
pipeline_parallel_degree = 2
microbatches = 2

[model]
type = "gpt"
layers = 2
heads = 2
width = 16

[data]
type = "text"
path = "text.txt"
sequence_length = 16
batch_size = 4

[train]
steps = 1000000
log_interval = 1
eval_steps = 0

[monitor]
stall_timeout = 1
)";

/// @returns the process of a rank, as its log has it
pid_t process_of(const train_dir& dir, int rank) {
  auto log = content_of(dir.path / "run" / ("log-" + std::to_string(rank)
                                            + ".txt"));
  const std::string before = "process ";
  auto begin = log.find(before);
  REQUIRE(begin != std::string::npos);
  return std::stoi(log.substr(begin + before.size()));
}

} // namespace

TEST_CASE("A stopped rank ends a run with exit code 4 where that is asked for",
          "[apps][stalls]") {
  train_dir dir{tiny};
  auto run = dir.start({"tiny.toml", "--run-dir", "run",
                        "--monitor.on_stall=end"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = process_of(dir, 1);
  REQUIRE(::kill(pid, SIGSTOP) == 0);
  CHECK(run.join() == 4);
  CHECK_THAT(run.output(), ContainsSubstring("rank 1 does not answer since "));
  CHECK(::kill(pid, 0) != 0);
  auto stall = nlohmann::json::parse(content_of(dir.path / "run/stall.json"));
  CHECK(stall.at("culprit") == 1);
  CHECK(stall.at("deadlock") == false);
  auto text = stall.at("text").get<std::string>();
  const std::string before = "nothing moved for ";
  REQUIRE_THAT(text, StartsWith(before));
  CHECK(std::stod(text.substr(before.size())) < 1 + 2); // timeout + 2 s
  CHECK_THAT(content_of(dir.path / "run/log-0.txt"),
             ContainsSubstring(text));
}

TEST_CASE("A rank that is stopped for a while is reported, and the run goes on",
          "[apps][stalls]") {
  train_dir dir{tiny};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = process_of(dir, 1);
  REQUIRE(::kill(pid, SIGSTOP) == 0);
  REQUIRE(run.wait_for("rank 1 does not answer since "));
  REQUIRE(::kill(pid, SIGCONT) == 0);
  auto last = dir.metrics("run").size();
  REQUIRE(run.wait_for(' ' + std::to_string(last + 50) + "/1000000"));
  run.signal(SIGINT);
  CHECK(run.join() == 130);
}
