// How much of two ranks a pipeline uses:
//
//   bench_pipeline [--width=N] [--rounds=N] [--steps=N] [--warmup=N]
//                  [--schedule=interleaved|simple] [--active=N]
//                  [--pin=1]
//
// Training steps (forward, backward, AdamW) of a GPT in 8 microbatches, over
// two ranks of one thread each and in one process without smp, in runs that
// take turns: what else happens on the machine then meets all of them. A
// pipeline of p ranks and m microbatches cannot be faster than
// (m + p - 1) / (m p) of one rank's time: it must fill and drain.
//
// Where others use the machine, --pin=1 keeps each rank on a core of its own:
// the kernel may else put both on one.

#include "bench/harness.hpp"
#include "bench/plain_gpt.hpp"

#include "runtime/models/gpt.hpp"
#include "runtime/smp.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <optional>

#include <sched.h>
#include <sys/resource.h>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

constexpr uint64_t ranks = 2;        // p
constexpr uint64_t microbatches = 8; // m
constexpr int64_t batch = 32;
constexpr double ideal = double(microbatches + ranks - 1)
                         / double(microbatches * ranks);

double seconds_between(clock::time_point x, clock::time_point y) {
  return std::chrono::duration<double>(y - x).count();
}

/// What every run trains.
struct task {
  explicit task(const arguments& x)
    : warmup(x.number("warmup", 3)),
      steps(x.number("steps", 10)),
      schedule(x.text("schedule", "interleaved")) {
    if (auto n = x.number("active", 0); n > 0)
      active = static_cast<uint64_t>(n);
    sizes.width = x.number("width", sizes.width);
  }

  gpt_sizes sizes;
  int64_t warmup;
  int64_t steps;
  std::string schedule;
  std::optional<uint64_t> active; // else the library's default
};

struct data {
  explicit data(const task& x) {
    torch::manual_seed(7);
    auto all = torch::randint(x.sizes.vocabulary, {batch, x.sizes.length + 1});
    tokens = all.narrow(1, 0, x.sizes.length).contiguous();
    targets = all.narrow(1, 1, x.sizes.length).contiguous();
  }

  torch::Tensor tokens, targets; // [B, T]
};

torch::optim::AdamWOptions optimizer_options() {
  return torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
}

/// logits: [B, T, V], targets: [B, T]
torch::Tensor loss_of(const torch::Tensor& logits,
                      const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              targets.flatten());
}

/// What a process used up since it began.
struct usage {
  usage() {
    ::getrusage(RUSAGE_SELF, &counted);
  }

  double cpu() const {
    auto seconds = [](const timeval& x) {
      return double(x.tv_sec) + double(x.tv_usec) * 1e-6;
    };
    return seconds(counted.ru_utime) + seconds(counted.ru_stime);
  }

  rusage counted{};
  /// s; a lack of cores is no fault of what is measured
  double waited = waited_for_a_core();
};

/// Runs `step`, and once it is warm notes how long each one took, from the
/// begin of one to the begin of the next, and what it used.
template <class Step, class Note>
void repeat(const task& x, record& result, Step step, Note note) {
  auto begin = clock::now();
  usage before;
  for (int64_t i = 0; i < x.warmup + x.steps; ++i) {
    step();
    auto end = clock::now();
    usage after;
    auto add = [&](const char* name, double value) {
      result.numbers[name].push_back(value);
    };
    if (i >= x.warmup) {
      add("step", seconds_between(begin, end));
      add("cpu", after.cpu() - before.cpu());
      add("waited", after.waited - before.waited);
      add("faults", double(after.counted.ru_minflt - before.counted.ru_minflt));
      add("switches", double(after.counted.ru_nvcsw - before.counted.ru_nvcsw));
      note();
    }
    begin = end;
    before = after;
  }
}

// -- one process --------------------------------------------------------------

void run_plain(const arguments& args, int threads) {
  at::set_num_threads(threads);
  const task x{args};
  const data d{x};
  torch::manual_seed(1);
  plain_gpt model{x.sizes};
  torch::optim::AdamW optimizer{model->parameters(), optimizer_options()};
  record result;
  double loss = 0;
  auto tokens = d.tokens.chunk(microbatches);
  auto targets = d.targets.chunk(microbatches);
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      loss = 0;
      for (uint64_t i = 0; i < microbatches; ++i) {
        auto part = loss_of(model(tokens[i]), targets[i])
                    / double(microbatches);
        part.backward();
        loss += part.item<double>();
      }
      optimizer.step();
    },
    [&] { result.numbers["loss"] = {loss}; });
  auto env = read_rank_environment();
  if (!env || env->rank == 0)
    write(result, args.text("file"));
}

// -- the pipeline -------------------------------------------------------------

void run_pipeline(const arguments& args) {
  const task x{args};
  session_config setup;
  setup.pipeline_parallel_degree = ranks;
  setup.microbatches = microbatches;
  setup.pipeline = x.schedule;
  setup.active_microbatches = x.active;
  setup.threads = 1;
  session s{setup};
  const data d{x};
  torch::manual_seed(1);
  gpt_config config;
  config.vocabulary = x.sizes.vocabulary;
  config.sequence_length = x.sizes.length;
  config.layers = x.sizes.layers;
  config.heads = x.sizes.heads;
  config.width = x.sizes.width;
  distributed_model model{gpt{config}};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  distributed_optimizer optimizer{adamw};
  auto train_step = step([&](torch::Tensor tokens, torch::Tensor targets) {
    auto loss = loss_of(model(tokens), targets);
    model.backward(loss);
    return loss;
  });
  model.partition();
  record result;
  result.text = model.partition_text();
  double loss = 0;
  std::vector<step_stats> stats;
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      loss = train_step(d.tokens, d.targets).reduce_mean().item<double>();
      optimizer.step();
    },
    [&] { stats.push_back(s.last_step()); });
  result.numbers["loss"] = {loss};
  auto gather = [&](const char* name, double value) {
    auto all = allgather(value);
    for (uint64_t i = 0; i < ranks; ++i)
      result.numbers[fmt::format("{}.{}", name, i)].push_back(all[i]);
    return all;
  };
  auto mine = result.numbers;
  for (size_t i = 0; i < stats.size(); ++i) {
    auto& y = stats[i];
    auto executing = gather("executing", y.executing_seconds);
    auto inside = gather("inside", y.seconds);
    gather("requests", static_cast<double>(y.requests));
    gather("bytes", static_cast<double>(y.bytes_sent));
    gather("cpu", mine["cpu"][i]);
    gather("faults", mine["faults"][i]);
    gather("switches", mine["switches"][i]);
    result.numbers["bubble"].push_back(
      1 - (executing[0] + executing[1]) / (inside[0] + inside[1]));
  }
  if (s.rank() == 0)
    write(result, args.text("file"));
}

// -- the comparison -----------------------------------------------------------

struct contestant {
  const char* text;
  const char* run;
  uint64_t processes;
  record result = {};
};

void print(const char* text, double min, double median,
           const char* unit = "s") {
  fmt::print("  {:<44} {:>8.4f} {:>8.4f} {}\n", text, min, median, unit);
}

void print_times(const std::vector<contestant>& xs, double& one_min,
                 double& one_median) {
  fmt::print("  {:<44} {:>8} {:>8}\n", "step time", "min", "median");
  for (auto& x : xs)
    print(x.text, minimum(x.result["step"]), median(x.result["step"]));
  auto& one = xs[1].result["step"];
  one_min = minimum(one);
  one_median = median(one);
  print("ideal: (m + p - 1) / (m p) of one thread", ideal * one_min,
        ideal * one_median);
}

void print_ratios(const std::vector<contestant>& xs, double target) {
  auto& mine = xs[0].result["step"];
  auto ratio = [&](const std::string& text, const series& other, double share) {
    print(text.c_str(), minimum(mine) / (share * minimum(other)),
          median(mine) / (share * median(other)), "");
  };
  ratio(fmt::format("pipeline / ideal (aim: {:.2f})", target),
        xs[1].result["step"], ideal);
  ratio("pipeline / one thread", xs[1].result["step"], 1);
  ratio("pipeline / two threads", xs[2].result["step"], 1);
  ratio("pipeline / ideal of two processes at once", xs[3].result["step"],
        ideal);
}

void print_explanation(const std::vector<contestant>& xs) {
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
  row("  MB sent", "bytes", 1e6);
  row("  page faults", "faults");
  row("  times a thread waited", "switches");
  fmt::print("  {:<44} {:>8.3f} (ideal: {:.3f})\n", "  bubble ratio",
             median(mine["bubble"]), 1 - 1 / (ideal * double(ranks)));
  print("  outside of the pipeline (optimizer)",
        minimum(mine["step"]) - minimum(mine["inside.0"]),
        median(mine["step"]) - median(mine["inside.0"]));
  fmt::print("  {:<44} {:>8} {:>8}\n", "rank 0 of each, per step", "s CPU",
             "s queued");
  for (auto& x : xs)
    fmt::print("    {:<42} {:>8.4f} {:>8.4f}\n", x.text,
               median(x.result["cpu"]), median(x.result["waited"]));
}

void compare(const scratch& dir, arguments args, int64_t width, double target) {
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
  double one_min = 0, one_median = 0;
  print_times(xs, one_min, one_median);
  print_ratios(xs, target);
  print_explanation(xs);
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
  std::fflush(stdout);
}

/// Keeps this process on the core whose number is its rank.
void pin() {
  auto env = read_rank_environment();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(env ? env->rank : 0, &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
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
    compare(dir, args, width > 0 ? width : 256, 1.10);
  if (width == 0 || width == 64)
    compare(dir, args, 64, 1.20);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  smp::prepare_process(argc, argv);
  try {
    smp::bench::run({argc, argv});
  } catch (const std::exception& e) {
    fmt::print(stderr, "bench_pipeline: {}\n", e.what());
    return 2;
  }
}
