#pragma once

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <list>
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
    : seed_(seed), signal_(signal), run_(start()) {
    std::mt19937 random{seed};
    moment_ = moments[random() % moments.size()];
    delay_ = milliseconds{random() % 200};
    rank_ = random() % 3;
  }

  /// Does what there is to do now. Fails the test unless all goes as it should.
  /// @returns false when nothing is left to do
  bool go_on() {
    INFO(fmt::format("seed {}: rank {}, {} ms after \"{}\"", seed_, rank_,
                     delay_.count(), moment_));
    if (clock::now() > deadline_)
      FAIL("it takes too long:\n" << run_.output());
    (this->*next_)();
    return next_ != nullptr;
  }

private:
  using clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  program start() const {
    std::filesystem::create_directory(dir_.path / "shm");
    std::vector<std::string> words{"tiny.toml", "--run-dir", "run"};
    // No run whose rank is killed is to end as a stall, however slow it is.
    if (signal_ == SIGSTOP)
      words.push_back("--monitor.stall_timeout=6");
    return dir_.start(std::move(words), {{"UCX_POSIX_DIR", dir_.path / "shm"}});
  }

  void await_ranks() {
    let_pass(milliseconds{1});
    ranks_ = children_of(run_.pid());
    if (ranks_.size() == 3)
      next_ = &random_fault::await_moment;
  }

  void await_moment() {
    auto ended = ended_within(run_.pid(), milliseconds{0});
    // Whatever one that ended has written is there.
    if (run_.wait_for(moment_, milliseconds{ended ? 10000 : 2})) {
      hit_at_ = clock::now() + delay_;
      next_ = &random_fault::await_delay;
    } else {
      INFO(run_.output());
      REQUIRE_FALSE(ended);
    }
  }

  void await_delay() {
    if (clock::now() < hit_at_)
      return;
    hit_ = ::kill(ranks_[rank_], signal_) == 0;
    deadline_ = clock::now() + std::chrono::seconds{120};
    next_ = &random_fault::await_end;
  }

  void await_end() {
    run_.wait_for("\1", milliseconds{2}); // reads what there is
    if (!ended_within(run_.pid(), milliseconds{0}))
      return;
    auto code = run_.join();
    INFO(run_.output());
    check(run_.output(), code);
    for (auto x : ranks_)
      CHECK(is_gone(x));
    check_nothing_left();
    next_ = nullptr;
  }

  void check(const std::string& output, int code) {
    using Catch::Matchers::ContainsSubstring;
    if (code == 0) { // the rank had nothing more to do
      CHECK(std::filesystem::exists(dir_.path / "run/model.safetensors"));
      return;
    }
    REQUIRE(hit_);
    CHECK(code == (signal_ == SIGKILL ? 3 : 4));
    auto name = fmt::format("rank {}", rank_);
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

  unsigned seed_;
  int signal_;
  train_dir dir_{short_run};
  program run_;
  std::string moment_;
  milliseconds delay_{};
  size_t rank_ = 0;
  std::vector<pid_t> ranks_;
  clock::time_point hit_at_;
  clock::time_point deadline_ = clock::now() + std::chrono::seconds{120};
  bool hit_ = false;
  void (random_fault::*next_)() = &random_fault::await_ranks;
};

/// Runs with the seeds from `first` to before `last`, eight at a time: most of
/// what they do is wait.
inline void run_random_faults(unsigned first, unsigned last, int signal) {
  std::list<random_fault> runs;
  while (first < last || !runs.empty()) {
    for (; runs.size() < 8 && first < last; ++first)
      runs.emplace_back(first, signal);
    runs.remove_if([](random_fault& x) { return !x.go_on(); });
  }
}

} // namespace smp::test
