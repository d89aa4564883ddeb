// ctest: seconds=40 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "tests/support/restarted_run.hpp"

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include <sys/resource.h>

// Runs that their launcher starts again (docs/recovery.md).

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
namespace fs = std::filesystem;

namespace {

size_t count_of(const std::string& what, const std::string& in) {
  size_t result = 0;
  for (auto at = in.find(what); at != in.npos; at = in.find(what, at + 1))
    ++result;
  return result;
}

} // namespace

TEST_CASE_METHOD(restarted_run,
                 "a run whose rank is killed goes on to the last bit",
                 "[apps][checkpoint][restarts][R51]") {
  auto whole = train("whole",
                     {"--checkpoint.dir=other", "--checkpoint.keep=100"});
  REQUIRE(whole->join() == 0);
  // Also where it was to begin anew, or elsewhere.
  auto resume = GENERATE("auto", "none", "branch");
  INFO(resume);
  uint64_t first = 0;
  if (resume == std::string{"branch"}) {
    first = 20;
    fs::create_directory(path / "branch");
    fs::copy(path / "other/step-20", path / "branch/step-20",
             fs::copy_options::recursive);
  }
  auto run = train("run", {"--train.max_restarts=3", "--train.eval_interval=4",
                           "--checkpoint.resume=" + std::string{resume}});
  kill_at(*run, 1, first + 2);  // before the first checkpoint
  kill_at(*run, 0, first + 10); // after it
  auto code = run->join();
  INFO(run->output());
  REQUIRE(code == 0);
  check_same_model("run", "whole");
  auto restarts = check_metrics("run", first);
  REQUIRE(restarts.size() == 2);
  CHECK(restarts[0]["from_step"] == first);
  CHECK(restarts[0]["cause"] == "rank 1: killed by signal 9 (SIGKILL)");
  CHECK(restarts[1]["from_step"] >= first + 4); // it may write the next one
  CHECK_THAT(
    run->output(),
    ContainsSubstring("smp: rank 1: killed by signal 9 (SIGKILL); its "
                      "output: run/log-1.txt; ")
      && ContainsSubstring("done; restart 1 of 3 in 1 s, from "
                           + std::string{first == 0 ? "the beginning\n" : ""})
      && ContainsSubstring("restart 2 of 3 in 1 s, from "
                           + (path / "checkpoints/step-").string()));
  auto end = nlohmann::json::parse(content_of(path / "run/end.json"));
  CHECK(end["exit_code"] == 0);
  CHECK(end["restarts"] == 2);
  // The logs of all attempts, and nobody to ask any more.
  CHECK(count_of(", process ", content_of(path / "run/log-1.txt")) == 3);
  // A checkpoint may have been complete when a kill came, but not told yet.
  CHECK(count_of("checkpoint at step", content_of(path / "run/log-0.txt"))
        >= 13 - first / 4);
  CHECK_FALSE(fs::exists(path / "run/inspect.entry"));
  CHECK_THAT(content_of(path / "run/config.toml"),
             ContainsSubstring(std::string{resume} + "\""));
}

TEST_CASE_METHOD(restarted_run,
                 "a fault that repeats at one place ends the run",
                 "[apps][restarts]") {
  auto run = train("run", {"--train.max_restarts=10"});
  for (int i = 0; i < 3; ++i) // each at its start
    kill_at(*run, 1, 0);
  CHECK(run->join() == 3);
  CHECK_THAT(run->output(),
             ContainsSubstring("restart 1 of 10 in 1 s, from the beginning\n")
               && ContainsSubstring("restart 2 of 10 in 2 s,")
               && ContainsSubstring(
                 "smp: rank 1: killed by signal 9 (SIGKILL); its output: "
                 "run/log-1.txt; not started again: 3 times after 0 steps, and "
                 "none got further; the first time rank 1: killed by signal 9 "
                 "(SIGKILL)\n"));
  auto end = nlohmann::json::parse(content_of(path / "run/end.json"));
  CHECK(end["exit_code"] == 3);
  CHECK(end["restarts"] == 2);
  CHECK_THAT(end["cause"].get<std::string>(),
             ContainsSubstring("not started again"));
}

TEST_CASE_METHOD(restarted_run, "a run that waits to begin again can be ended",
                 "[apps][restarts]") {
  auto run = train("run", {"--train.max_restarts=10"});
  kill_at(*run, 1, 0);
  kill_at(*run, 1, 0);
  REQUIRE(run->wait_for("restart 2 of 10 in 2 s"));
  // Tools know that it is not over.
  CHECK_THAT(content_of(path / "run/inspect.entry"),
             ContainsSubstring("\nport 0\n"));
  run->signal(SIGUSR1); // there is nothing to save
  run->signal(SIGINT);
  CHECK(run->join() == 130);
  CHECK_THAT(run->output(), ContainsSubstring("\nsmp: interrupted\n"));
  auto end = nlohmann::json::parse(content_of(path / "run/end.json"));
  CHECK(end["exit_code"] == 130);
  CHECK(end["restarts"] == 1);
}

TEST_CASE_METHOD(restarted_run, "a run that cannot begin again says why",
                 "[apps][restarts]") {
  auto run = train("run", {"--train.max_restarts=10"});
  kill_at(*run, 1, 0);
  REQUIRE(run->wait_for("restart 1 of 10 in 1 s"));
  const rlimit few{47, 47}; // open files
  REQUIRE(::prlimit(run->pid(), RLIMIT_NOFILE, &few, nullptr) == 0);
  CHECK(run->join() == 2);
  CHECK_THAT(run->output(), ContainsSubstring("\nsmp: not started again: "));
  auto end = nlohmann::json::parse(content_of(path / "run/end.json"));
  CHECK(end["exit_code"] == 2);
  CHECK(end["restarts"] == 1);
  CHECK_THAT(end["cause"].get<std::string>(),
             ContainsSubstring("killed by signal 9 (SIGKILL); not started "
                               "again: "));
  CHECK_FALSE(fs::exists(path / "run/inspect.entry"));
}

TEST_CASE_METHOD(restarted_run,
                 "what another start cannot help is not repeated",
                 "[apps][restarts]") {
  struct row {
    std::vector<std::string> options;
    int code;
    std::string text;
    std::map<std::string, std::string> environment = {};
  };
  const std::vector<row> rows{
    {{"--smp.manual_partition={\"no.such\" = 1}"}, 2, "no.such"},
    {{"--optimizer.lr=1e30"}, 5, "the loss is nan"},
    {{"--train.elastic=true"},
     2,
     "train.elastic is for runs over several machines (--nodes, --hosts)"},
    {{"--train.elastic=true", "--nodes=2", "--node-rank=0", "--master=a:29400"},
     2,
     "train.elastic = true, but the run cannot do with fewer ranks: one "
     "replica needs 2 of them"},
    {{"--train.elastic=true", "--nodes=2", "--node-rank=0", "--master=a:29400",
      "--smp.ddp=true", "--ranks=4", "--smp.pipeline=simple",
      "--smp.active_microbatches=4"},
     2,
     "fewer ranks: with 2, "},
    {{"--ranks=2"},
     2,
     "train.max_restarts = 3 is for ranks that smp-train itself starts: under "
     "mpirun or srun, start one process on each machine, with --nodes N",
     of_two_under_mpirun(0)},
    {{"--nodes=4"}, 2, "there are 2 processes", of_two_under_mpirun(0)}};
  for (auto& x : rows) {
    auto run = train("run", {"--train.max_restarts=3"}, x.environment,
                     x.options);
    auto code = run->join();
    INFO(run->output());
    CHECK(code == x.code);
    CHECK_THAT(run->output(),
               ContainsSubstring(x.text) && !ContainsSubstring("restart 1 of"));
    fs::remove_all(path / "run");
    fs::remove_all(path / "checkpoints");
  }
}
