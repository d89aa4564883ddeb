#pragma once

#include "tests/support/processes.hpp"
#include "tests/support/train_dir.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

// A rank of smp-train is killed or stopped at any moment of a run.

namespace smp::test {

/// Three ranks that train and write a model.
inline const std::string short_run = R"([smp]
pipeline_parallel_degree = 3
microbatches = 4

[model]
type = "mlp"
layers = 6
width = 64
inputs = 12
outputs = 4

[data]
type = "synthetic"
batch_size = 8

[train]
steps = 150
log_interval = 1
eval_steps = 0
save_model = true

[monitor]
stall_timeout = 60
on_stall = "end"
)";

/// What the console says before the moment comes.
inline constexpr std::array moments{"",        "",         "model",   " 1/150 ",
                                    " 2/150 ", " 60/150 ", "149/150 "};

/// A moment of a run, the same for each seed: something that is seen, and up to
/// 200 ms.
class random_fault {
public:
  explicit random_fault(unsigned seed, int signal)
    : random_(seed), signal_(signal), dir_(short_run) {
    std::filesystem::create_directory(dir_.path / "shm");
  }

  /// Fails the test unless all ends as it should.
  void run() {
    const std::string moment = moments[random_() % moments.size()];
    const std::chrono::milliseconds delay{random_() % 200};
    const auto rank = random_() % 3;
    auto at = fmt::format("rank {}, {} ms after \"{}\"", rank, delay.count(),
                          moment);
    std::vector<std::string> words{"tiny.toml", "--run-dir", "run"};
    // No run whose rank is killed is to end as a stall, however slow it is.
    if (signal_ == SIGSTOP)
      words.push_back("--monitor.stall_timeout=6");
    auto run = dir_.start(std::move(words),
                          {{"UCX_POSIX_DIR", dir_.path / "shm"}});
    std::vector<pid_t> ranks;
    while (ranks.size() < 3 && !is_gone(run.pid()))
      ranks = children_of(run.pid());
    INFO(at);
    REQUIRE(ranks.size() == 3);
    REQUIRE(run.wait_for(moment));
    let_pass(delay);
    auto hit = ::kill(ranks[rank], signal_) == 0;
    auto code = run.join(std::chrono::seconds{60});
    INFO(run.output());
    check(run.output(), code, rank, hit);
    for (auto x : ranks)
      CHECK(is_gone(x));
    check_nothing_left();
  }

private:
  void check(const std::string& output, int code, size_t rank, bool hit) {
    using Catch::Matchers::ContainsSubstring;
    if (code == 0) { // the rank had nothing more to do
      CHECK(std::filesystem::exists(dir_.path / "run/model.safetensors"));
      return;
    }
    REQUIRE(hit);
    CHECK(code == (signal_ == SIGKILL ? 3 : 4));
    auto name = fmt::format("rank {}", rank);
    CHECK_THAT(output, ContainsSubstring(name));
    if (signal_ == SIGKILL)
      CHECK_THAT(output,
                 ContainsSubstring(name + ": killed by signal 9 (SIGKILL)"));
    // Nobody else was hit by anything.
    for (auto text :
         {"SIGSEGV", "SIGABRT", "SIGBUS", "terminate called", "assertion"})
      for (int i = 0; i < 3; ++i) {
        auto log = dir_.path / fmt::format("run/log-{}.txt", i);
        if (std::filesystem::exists(log))
          CHECK_THAT(content_of(log), !ContainsSubstring(text));
      }
  }

  void check_nothing_left() const {
    CHECK(std::filesystem::is_empty(dir_.path / "shm"));
    for (auto& x : std::filesystem::recursive_directory_iterator{dir_.path})
      CHECK(x.path().string().find(".partial-") == std::string::npos);
  }

  std::mt19937 random_;
  int signal_;
  train_dir dir_;
};

} // namespace smp::test
