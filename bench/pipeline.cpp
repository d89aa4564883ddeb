// How well a pipeline uses two ranks:
//
//   bench_pipeline [--width=N] [--rounds=N] [--steps=N] [--warmup=N]
//                  [--schedule=interleaved|simple|...] [--active=N]
//                  [--static=1] [--fast=0] [--pin=1] [--device=cuda]
//
// Training steps (forward, backward, AdamW) of a GPT in 8 microbatches, over
// two ranks of one thread each and in one process without smp, in alternating
// runs, so that other load on the machine affects all of them. A pipeline of p
// ranks and m microbatches cannot be faster than (m + p - 1) / (m p) of one
// rank's time: it must fill and drain.
//
// On a shared machine, --pin=1 keeps each rank on a core of its own: otherwise
// the kernel may put both on one.

#include "bench/gpt_job.hpp"

#include <cstdio>

namespace smp::bench {

namespace {

using namespace gpt_job;

constexpr uint64_t ranks = 2;

// -- the comparison -----------------------------------------------------------

struct contestant {
  const char* text;
  const char* run;
  uint64_t processes;
  figures result = {};
};

void print(const char* text, double min, double median,
           const char* unit = "s") {
  fmt::print("  {:<44} {:>8.4f} {:>8.4f} {}\n", text, min, median, unit);
}

/// @param share of the time of one process that is ideal
void print_times(const std::vector<contestant>& xs, double share) {
  fmt::print("  {:<44} {:>8} {:>8}\n", "step time", "min", "median");
  for (auto& x : xs)
    print(x.text, minimum(x.result["step"]), median(x.result["step"]));
  auto& one = xs[1].result["step"];
  print("ideal: (m + p - 1) / (m p) of one thread", share * minimum(one),
        share * median(one));
}

void print_ratios(const std::vector<contestant>& xs, double ideal_share,
                  double target) {
  auto& mine = xs[0].result["step"];
  auto ratio = [&](const std::string& text, const series& other, double share) {
    print(text.c_str(), minimum(mine) / (share * minimum(other)),
          median(mine) / (share * median(other)), "");
  };
  ratio(fmt::format("pipeline / ideal (aim: {:.2f})", target),
        xs[1].result["step"], ideal_share);
  ratio("pipeline / one thread", xs[1].result["step"], 1);
  ratio("pipeline / two threads", xs[2].result["step"], 1);
  ratio("pipeline / ideal of two processes at once", xs[3].result["step"],
        ideal_share);
}

void print_explanation(const std::vector<contestant>& xs, double share) {
  auto& mine = xs[0].result;
  auto row = [&](const char* text, const std::string& name, double unit = 1) {
    fmt::print("  {:<44}", text);
    for (uint64_t i = 0; i < ranks; ++i)
      fmt::print(" {:>8.4g}",
                 median(mine[fmt::format("{}.{}", name, i)]) / unit);
    fmt::print("\n");
  };
  fmt::print("  {:<44} {:>8} {:>8}\n", "a step of the pipeline, medians",
             "rank 0", "rank 1");
  row("  in the pipeline, s", "inside");
  row("  executing, s", "executing");
  row("  CPU time of the process, s", "cpu");
  row("  requests sent", "requests");
  row("  waits for an answer", "waits");
  row("  MB sent", "bytes", 1e6);
  row("  page faults", "faults");
  row("  times a thread waited", "switches");
  fmt::print("  {:<44} {:>8.3f} (ideal: {:.3f})\n", "  bubble ratio",
             median(mine["bubble"]), 1 - 1 / (share * double(ranks)));
  print("  outside of the pipeline (optimizer)",
        minimum(mine["step"]) - minimum(mine["inside.0"]),
        median(mine["step"]) - median(mine["inside.0"]));
  fmt::print("  {:<44} {:>8} {:>8}\n", "rank 0 of each, per step", "s CPU",
             "s queued");
  for (auto& x : xs)
    fmt::print("    {:<42} {:>8.4f} {:>8.4f}\n", x.text,
               median(x.result["cpu"]), median(x.result["waited"]));
}

/// @returns how near to the ideal a pipeline should come: small steps show the
/// cost of messages, and a replayed step sends fewer
double aim(const arguments& x, int64_t width) {
  if (width != 64)
    return 1.10;
  return x.number("static", 0) != 0 ? 1.03 : 1.05;
}

void compare(const scratch& dir, arguments args, int64_t width) {
  args.set(fmt::format("--width={}", width));
  std::vector<contestant> xs{
    {"pipeline, 2 processes with 1 thread each", "pipeline", ranks},
    {"one process, 1 thread", "one", 1},
    {"one process, 2 threads", "two", 1},
    {"two such processes at once, 1 thread each", "one", 2}};
  fmt::print(
    "\nGPT of width {}: {} layers, {} heads, sequence {}, batch {}, {} "
    "microbatches\n",
    width, gpt_sizes{}.layers, gpt_sizes{}.heads, gpt_sizes{}.length, batch,
    microbatches);
  auto before = machine_load();
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i)
    for (auto& x : xs)
      x.result.add(run_fresh(dir, x.processes, x.run, args));
  fmt::print("{}\n", xs[0].result.text);
  const auto share = ideal(ranks, processors(args));
  print_times(xs, share);
  print_ratios(xs, share, aim(args, width));
  print_explanation(xs, share);
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
  std::fflush(stdout);
}

void run(const arguments& args) {
  auto what = args.text("run");
  if (args.number("pin", 0) != 0 && (what == "pipeline" || what == "one"))
    pin();
  if (what == "pipeline")
    return run_pipeline(args);
  if (what == "one")
    return run_plain(args, 1);
  if (what == "two")
    return run_plain(args, 2);
  scratch dir;
  auto width = args.number("width", 0);
  if (width != 64)
    compare(dir, args, width > 0 ? width : 256);
  if (width == 0 || width == 64)
    compare(dir, args, 64);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
