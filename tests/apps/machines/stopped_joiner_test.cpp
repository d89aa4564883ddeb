// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <csignal>
#include <map>
#include <string>
#include <vector>

// A rank that is stopped before it could join, where no launcher of ours sees
// it.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

struct without_launcher : train_dir {
  without_launcher() : train_dir(endless_gpt()) {
    // nop
  }

  program start_rank(int rank, const std::string& script,
                     std::vector<std::string> more) const {
    std::vector<std::string> words{
      "sh",        "-c",      script, built_program("smp-train"),
      "tiny.toml", "--ranks", "2",    "--run-dir",
      "run"};
    words.insert(words.end(), more.begin(), more.end());
    return program{words, path, of_two_under_mpirun(rank)};
  }

  program start_rank_0(std::vector<std::string> more) const {
    return start_rank(0, R"(exec "$0" "$@")", std::move(more));
  }

  /// It stops itself before it is smp-train.
  program start_stopped_rank_1(std::vector<std::string> more) const {
    return start_rank(1, R"(kill -STOP $$; exec "$0" "$@")", std::move(more));
  }
};

const std::string stopped = "rank 1 has been stopped by a signal for ";

} // namespace

TEST_CASE_METHOD(
  without_launcher,
  "A rank that is stopped before it joined is reported, and when "
  "it goes on so does the run",
  "[apps][stalls][R7]") {
  std::vector<std::string> more{"--monitor.stall_timeout=1"};
  auto rank_1 = start_stopped_rank_1(more);
  auto rank_0 = start_rank_0(more);
  CHECK(rank_0.wait_for(stopped));
  CHECK_THAT(rank_0.output(), ContainsSubstring("before all ranks joined"));
  rank_1.signal(SIGCONT);
  CHECK(rank_0.wait_for(" 2/1000000"));
  for (auto x : {&rank_0, &rank_1})
    x->signal(SIGINT);
  CHECK(rank_0.join() == 130);
}

TEST_CASE_METHOD(without_launcher,
                 "A rank that is stopped before it joined ends the run where "
                 "that is asked for",
                 "[apps][stalls][R7]") {
  std::vector<std::string> more{"--monitor.stall_timeout=1",
                                "--monitor.on_stall=end"};
  auto rank_1 = start_stopped_rank_1(more);
  auto rank_0 = start_rank_0(more);
  CHECK(rank_0.join() == 4); // 3: the time to join ended it
  CHECK_THAT(rank_0.output(), ContainsSubstring(stopped));
}
