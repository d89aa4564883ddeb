// How long a run takes from its start to its first training step:
//
//   bench_startup [--config=FILE] [--rounds=N]
//
// Starts smp-train (the program beside this one) with two steps of the
// quickstart and watches its metrics.jsonl.

#include "bench/harness.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/process/process.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include <fcntl.h>

namespace smp::bench {

namespace {

namespace fs = std::filesystem;
using clock = std::chrono::steady_clock;

constexpr std::chrono::seconds limit{300}; // for a busy machine

double seconds_since(clock::time_point x) {
  return std::chrono::duration<double>(clock::now() - x).count();
}

std::string default_config() {
  auto root = fs::path{__FILE__}.parent_path().parent_path();
  return root / "config" / "quickstart.toml";
}

/// @returns the first line of a file, once it is complete
std::optional<std::string> first_line(const fs::path& file) {
  std::ifstream in{file};
  std::string result;
  if (!std::getline(in, result) || in.eof())
    return std::nullopt;
  return result;
}

/// Records the times from the launch to the begin of the first step, to its
/// end, and to the end of the run.
void start_once(const scratch& dir, const arguments& args, figures& result) {
  const std::string run_dir = dir / "run";
  fs::remove_all(run_dir);
  spawn_options x;
  x.program = fs::path{own_program()}.parent_path() / "smp-train";
  x.arguments = {x.program,
                 args.text("config", default_config()),
                 "--run-dir",
                 run_dir,
                 "--train.steps=2",
                 "--optimizer.schedule.warmup_steps=1",
                 "--train.eval_steps=0",
                 "--train.sample=0",
                 "--train.save_model=false"};
  const std::string log = dir / "log.txt";
  file_descriptor output{
    ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
  x.out = x.err = output.get();
  auto begin = clock::now();
  auto pid = spawn(x);
  output.reset();
  std::optional<process_end> end;
  std::optional<std::string> line;
  while (!end) {
    if (seconds_since(begin) > double(limit.count()))
      throw std::runtime_error{"no end of smp-train within five minutes"};
    if (!line && (line = first_line(fs::path{run_dir} / "metrics.jsonl"))) {
      auto now = seconds_since(begin);
      auto step = nlohmann::json::parse(*line).at("step_seconds").get<double>();
      result.numbers["begins"].push_back(now - step);
      result.numbers["done"].push_back(now);
    }
    end = reap(pid);
    std::this_thread::sleep_for(std::chrono::milliseconds{2});
  }
  result.numbers["ended"].push_back(seconds_since(begin));
  if (end->code != 0 || !line)
    throw std::runtime_error{"smp-train " + end->describe() + "\n"
                             + read_text(log)};
}

void run(const arguments& args) {
  scratch dir;
  figures result;
  auto before = machine_load();
  for (int64_t i = 0, n = args.number("rounds", 5); i < n; ++i)
    start_once(dir, args, result);
  fmt::print(
    "smp-train quickstart.toml, seconds since its launch\n"
    "  {:<42} {:>8} {:>8}\n",
    "", "min", "median");
  auto print = [&](const char* text, const char* name) {
    fmt::print("  {:<42} {:>8.2f} {:>8.2f}\n", text, minimum(result[name]),
               median(result[name]));
  };
  print("the first step begins (aim: < 5)", "begins");
  print("the first step is done", "done");
  print("two steps later everything has ended", "ended");
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
