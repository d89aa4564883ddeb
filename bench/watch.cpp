// What being watched costs a run:
//
//   bench_watch [--config=FILE] [--rounds=N] [--seconds=N] [--warmup=N]
//
// One run of the quickstart by smp-train (the program beside this one). For
// --seconds at a time it is not watched, and for as long smp-top --once --json
// looks once a second, in turn. A turn gives the mean time of its steps; what
// smp-top itself takes from the run counts. The first --warmup steps do not.

#include "bench/harness.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/process/process.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <optional>
#include <thread>

#include <fcntl.h>

namespace smp::bench {

namespace {

namespace fs = std::filesystem;
using clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr seconds limit{300}; // for a busy machine

std::string default_config() {
  auto root = fs::path{__FILE__}.parent_path().parent_path();
  return root / "config" / "quickstart.toml";
}

/// A program beside this one, whose output goes to a file.
class child {
public:
  child(const std::string& name, std::vector<std::string> arguments,
        std::string log)
    : name_(name), log_(std::move(log)) {
    spawn_options x;
    x.program = fs::path{own_program()}.parent_path() / name;
    x.arguments = std::move(arguments);
    x.arguments.insert(x.arguments.begin(), x.program);
    file_descriptor output{
      ::open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
    x.out = x.err = output.get();
    pid_ = spawn(x);
  }

  ~child() {
    if (!end_)
      ::kill(pid_, SIGKILL);
    while (!ended())
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }

  child(const child&) = delete;
  child& operator=(const child&) = delete;

  bool ended() {
    if (!end_)
      end_ = reap(pid_);
    return end_.has_value();
  }

  /// @returns its exit code
  int wait() {
    for (auto begin = clock::now(); !ended();) {
      if (clock::now() - begin > limit)
        fail("does not end");
      std::this_thread::sleep_for(std::chrono::milliseconds{20});
    }
    return end_->code;
  }

  void interrupt() {
    ::kill(pid_, SIGINT);
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error{name_ + " " + why + "\n" + read_text(log_)};
  }

private:
  std::string name_;
  std::string log_;
  pid_t pid_ = 0;
  std::optional<process_end> end_;
};

/// A run that continues until this object ends it.
class endless_run {
public:
  endless_run(const scratch& dir, const arguments& args)
    : dir_(dir / "run"),
      look_log_(dir / "look.txt"),
      train_("smp-train",
             {args.text("config", default_config()), "--run-dir", dir_,
              "--train.steps=1000000", "--train.eval_steps=0",
              "--train.sample=0", "--train.save_model=false"},
             dir / "train.txt") {
    const auto warmup = static_cast<size_t>(args.number("warmup", 20));
    for (auto begin = clock::now(); steps().size() < warmup;) {
      check();
      if (clock::now() - begin > limit)
        train_.fail("makes no steps");
      std::this_thread::sleep_for(std::chrono::milliseconds{100});
    }
  }

  /// @param looks whether smp-top asks once a second
  /// @returns the mean time of the steps during the turn, in seconds
  double turn(int64_t length, bool looks) {
    const auto before = steps().size();
    for (auto next = clock::now(), end = next + seconds{length}; next < end;) {
      if (looks)
        look();
      next += seconds{1};
      std::this_thread::sleep_until(next);
    }
    check();
    const auto all = steps();
    // The first step began in the previous turn.
    if (all.size() < before + 2)
      train_.fail("takes longer for a step than a turn; set --seconds");
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(before) + 1;
    return std::accumulate(first, all.end(), 0.0)
           / static_cast<double>(all.end() - first);
  }

  void end() {
    train_.interrupt();
    train_.wait();
  }

  int64_t looks() const noexcept {
    return looks_;
  }

  /// How often smp-top reported a problem.
  int64_t complaints() const noexcept {
    return complaints_;
  }

private:
  void check() {
    if (train_.ended())
      train_.fail("ended");
  }

  void look() {
    child top{"smp-top", {"--once", "--json", dir_}, look_log_};
    auto code = top.wait();
    if (code > 1)
      top.fail("saw nothing");
    ++looks_;
    complaints_ += code;
  }

  /// @returns the times of all completed steps
  series steps() const {
    series result;
    std::ifstream in{dir_ + "/metrics.jsonl"};
    for (std::string line; std::getline(in, line) && !in.eof();)
      result.push_back(
        nlohmann::json::parse(line).at("step_seconds").get<double>());
    return result;
  }

  std::string dir_;
  std::string look_log_;
  child train_;
  int64_t looks_ = 0;
  int64_t complaints_ = 0;
};

void run(const arguments& args) {
  scratch dir;
  auto before = machine_load();
  const auto length = args.number("seconds", 5);
  series alone, watched;
  endless_run job{dir, args};
  for (int64_t i = 0, n = args.number("rounds", 8); i < n; ++i) {
    alone.push_back(job.turn(length, false));
    watched.push_back(job.turn(length, true));
  }
  job.end();
  fmt::print(
    "{}, seconds a step in turns of {} s\n"
    "  {:<42} {:>8} {:>8}\n",
    args.text("config", "smp-train quickstart.toml"), length, "", "min",
    "median");
  auto print = [](const char* text, double min, double median) {
    fmt::print("  {:<42} {:>8.4f} {:>8.4f}\n", text, min, median);
  };
  print("nobody looks", minimum(alone), median(alone));
  print("smp-top --once --json each second", minimum(watched), median(watched));
  print("over nobody (aim: < 1.02)", minimum(watched) / minimum(alone),
        median(watched) / median(alone));
  fmt::print(
    "  {} looks, of which {} found something wrong\n"
    "  load of the machine: {:.1f} before, {:.1f} after\n",
    job.looks(), job.complaints(), before, machine_load());
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
