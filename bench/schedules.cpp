// How far each schedule is from what theory and the checker predict:
//
//   bench_schedules [--steps=N] [--forward_ms=N] [--forgive_ms=N]
//                   [--mode=dynamic,static,static+fast,deterministic]
//                   [--stages=0] [--touch=1] [--rounds=N] [--width=N]
//                   [--peer=0] [--pin=1]
//                   [--ranks=N]
//
// First a model whose stages only sleep, forward for --forward_ms and backward
// for twice as long, each to an absolute deadline: they occupy their rank but
// no core, so more ranks than cores can be measured. If a stage begins less
// than --forgive_ms late, its deadline does not move, or the figures would
// depend on the machine's load; the column `late` has the median instead. With
// --forgive_ms=0 all time of a step besides sleeping is bubble. With --touch=1
// the code on rank 0 computes with each result before it goes on: no theory
// covers that, so it is compared with the checker's prediction.
//
// Then a real training job, a GPT over two ranks (or --ranks) of one thread
// each, in runs that alternate with the same job by
// torch.distributed.pipelining.

#include "bench/gpt_job.hpp"

#include "partition/schedule/checker.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"

#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <thread>

namespace smp::bench {

namespace {

using gpt_job::clock;
using gpt_job::seconds_between;

/// How remote calls and their order are determined: by default, replayed (calls
/// that wait, or with "fast" those that go on), or in one fixed order.
struct mode {
  const char* text;
  std::vector<std::string> arguments;
  int64_t warmup; // a record is chosen after five steps
};

const std::array<mode, 4>& modes() {
  static const std::array<mode, 4> result{
    mode{"dynamic", {}, 2}, mode{"static", {"--static=1", "--fast=0"}, 7},
    mode{"static+fast", {"--static=1"}, 7},
    mode{"deterministic", {"--deterministic=1"}, 5}};
  return result;
}

/// @returns true unless --mode names others, with commas between them
bool wanted(const mode& x, const arguments& args) {
  auto only = args.text("mode");
  return only.empty()
         || fmt::format(",{},", only).find(fmt::format(",{},", x.text))
              != only.npos;
}

void set(arguments& args, const mode& x) {
  for (auto& y : x.arguments)
    args.set(y);
  args.set(fmt::format("--warmup={}", x.warmup));
}

// -- stages that sleep --------------------------------------------------------

/// Times of stages, in seconds of the machine's one monotonic clock. A stage is
/// due a fixed time after its input was due and its rank was free, whenever it
/// really began: so a late wake-up on a busy machine does not add up. A stage
/// that is later than `forgiven` had to wait for something, and that counts.
struct timetable {
  static double now() {
    return std::chrono::duration<double>(clock::now().time_since_epoch())
      .count();
  }

  /// Occupies this rank. @returns when the stage was due
  double occupy(double ready, double seconds) {
    auto begin = std::max(ready, free);
    auto behind = now() - begin;
    late.push_back(behind);
    if (behind > forgiven)
      begin += behind;
    free = begin + seconds;
    std::this_thread::sleep_until(
      clock::time_point{std::chrono::duration_cast<clock::duration>(
        std::chrono::duration<double>{free})});
    return free;
  }

  double forgiven = 0;
  double free = 0;
  series late;
};

/// Of this rank; only the holder of its execution token touches it.
timetable times;

/// Instead of data, tensors carry the time at which they were due, both ways.
struct sleeping : torch::autograd::Function<sleeping> {
  /// x: [B, 1], w: [1]
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx,
                               const torch::Tensor& x, const torch::Tensor&,
                               double seconds, bool last) {
    auto due = times.occupy(x.max().item<double>(), seconds);
    ctx->saved_data["seconds"] = 2 * seconds;
    ctx->saved_data["ready"] = last ? due : 0; // its gradient is a seed
    return torch::full_like(x, due);
  }

  static torch::autograd::variable_list
  backward(torch::autograd::AutogradContext* ctx,
           torch::autograd::variable_list grads) {
    auto ready = ctx->saved_data["ready"].toDouble();
    if (ready == 0)
      ready = grads[0].max().item<double>();
    auto due = times.occupy(ready, ctx->saved_data["seconds"].toDouble());
    return {torch::full_like(grads[0], due), torch::zeros({1}), {}, {}};
  }
};

struct sleeper_impl : torch::nn::Module {
  sleeper_impl(double seconds, bool last)
    : seconds(seconds),
      last(last),
      weight(register_parameter("weight", torch::ones({1}))) {
    // nop
  }

  torch::Tensor forward(torch::Tensor x) {
    return sleeping::apply(x, weight, seconds, last);
  }

  double seconds; // forward
  bool last;      // of the pipeline
  torch::Tensor weight;
};
TORCH_MODULE_IMPL(sleeper, sleeper_impl);

/// Parameters of a run of such stages, known to every rank.
struct stage_task {
  explicit stage_task(const arguments& x)
    : schedule(x.text("schedule")),
      ranks(static_cast<uint64_t>(x.number("ranks", 2))),
      chunks(static_cast<uint64_t>(x.number("chunks", 1))),
      touch(x.number("touch", 0) != 0),
      microbatches(static_cast<uint64_t>(x.number("microbatches", 8))),
      forward(1e-3 * static_cast<double>(x.number("forward_ms", 20))),
      forgiven(1e-3 * static_cast<double>(x.number("forgive_ms", 5))) {
    // nop
  }

  uint64_t stages() const {
    return ranks * chunks;
  }

  double stage_seconds() const {
    return forward / static_cast<double>(chunks);
  }

  /// The work of each rank in a step, in seconds.
  double busy() const {
    return 3 * forward * static_cast<double>(microbatches);
  }

  /// Narayanan et al. 2021, section 2.2: filling and draining takes p - 1
  /// stages of a v-th of a microbatch. With fewer microbatches than ranks, a
  /// microbatch has to come round before it can enter the next chunk.
  double theory() const {
    auto p = static_cast<double>(ranks), v = static_cast<double>(chunks),
         m = static_cast<double>(microbatches);
    return 1 - v * m / (microbatches < ranks ? v * p + m - 1 : v * m + p - 1);
  }

  double bubble(double step_seconds) const {
    return 1 - busy() / step_seconds;
  }

  std::string schedule;
  uint64_t ranks, chunks;
  bool touch;
  uint64_t microbatches;
  double forward; // of a microbatch on one rank, in seconds
  double forgiven;
};

struct stages_impl : torch::nn::Module {
  explicit stages_impl(const stage_task& x) : touch(x.touch) {
    for (uint64_t i = 0; i < x.stages(); ++i) {
      submodule<sleeper> stage{x.stage_seconds(), i + 1 == x.stages()};
      set_partition(*stage, static_cast<uint32_t>(i % x.ranks));
      stages.push_back(register_module(fmt::format("stage{}", i), stage));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& stage : stages) {
      x = stage(x);
      if (touch)
        x = x * 1;
    }
    return x;
  }

  bool touch;
  std::vector<submodule<sleeper>> stages;
};
TORCH_MODULE_IMPL(stages, stages_impl);

/// @returns the checker's prediction for these stages, with messages that take
/// no time
schedule_report predict(session& s, const partition_decision& decision,
                        const stage_task& x) {
  auto model = decision.model;
  for (auto& y : model)
    y.compute = y.children.empty() ? x.stage_seconds() : 0;
  program_times times;
  times.step_seconds = 3 * x.forward * static_cast<double>(x.ranks);
  return s.internals().policies().play(
    make_program(model, decision.plan, times), x.microbatches, false);
}

/// Ranks that only sleep take no time from other processes, but a busy machine
/// lets them oversleep: raise their priority, if permitted. Threads inherit it.
void go_first() {
  const sched_param x{.sched_priority = 10};
  ::sched_setscheduler(0, SCHED_FIFO, &x);
}

void run_stages(const arguments& args) {
  const stage_task x{args};
  go_first();
  session_config setup;
  setup.pipeline_parallel_degree = x.ranks;
  setup.microbatches = x.microbatches;
  setup.pipeline = x.schedule;
  setup.chunks = x.chunks;
  // A trace shows which calls wait.
  setup.trace_device = x.touch ? "cpu" : "none";
  setup.print_partition = false;
  setup.threads = 1;
  gpt_job::set_modes(args, setup);
  session s{setup};
  distributed_model model{stages{x}};
  auto train_step = step([&](torch::Tensor input) {
    auto loss = model(input).mean();
    model.backward(loss);
    return loss.detach();
  });
  const auto rows = static_cast<int64_t>(x.microbatches);
  times.forgiven = x.forgiven;
  figures result;
  auto warmup = args.number("warmup", 2);
  for (int64_t i = 0, n = warmup + args.number("steps", 8); i < n; ++i) {
    barrier();
    times.late.clear();
    auto begin = timetable::now();
    train_step(torch::full({rows, 1}, begin, torch::kDouble));
    auto end = timetable::now();
    auto late = allgather(median(times.late));
    if (i < warmup)
      continue;
    result.numbers["step"].push_back(end - begin);
    result.numbers["late"].push_back(median(late));
    result.numbers["replayed"].push_back(s.last_step().replayed ? 1 : 0);
    result.numbers["waits"].push_back(double(s.last_step().waits));
  }
  if (s.rank() == 0) {
    auto report = predict(s, *model.state().decision(), x);
    result.numbers["makespan"] = {report.makespan};
    write(result, args.text("file"));
  }
}

struct stage_row {
  const char* schedule;
  uint64_t ranks;
  uint64_t chunks;
  uint64_t microbatches;
};

std::vector<stage_row> stage_rows() {
  std::vector<stage_row> result;
  for (uint64_t p : {2, 4})
    for (uint64_t m : {uint64_t{8}, p / 2}) {
      for (auto name : {"simple", "interleaved", "1f1b"})
        result.push_back({name, p, 1, m});
      result.push_back({"interleaved_1f1b", p, 2, m});
    }
  return result;
}

/// @param points by which the measured bubble may differ from theory
void measure_stages(const scratch& dir, const arguments& args, double points) {
  fmt::print(
    "stages that sleep {} ms forward and {} ms backward per microbatch; bubble "
    "in %, least and median of {} steps; d: median less {}, in points; "
    "late: how much after its input was due a stage began\n"
    "  {:<12} {:<17}{:>3}{:>3}{:>7}{:>8}{:>7}{:>7}{:>6}{:>8}{:>8}{:>8}  {}\n",
    args.number("forward_ms", 20), 2 * args.number("forward_ms", 20),
    args.number("steps", 8),
    args.number("touch", 0) != 0 ? "the checker's" : "theory", "mode",
    "schedule", "p", "m", "theory", "checker", "least", "median", "d",
    "ideal s", "step s", "late ms", fmt::format("within {:g}", points));
  for (auto& how : modes()) {
    if (!wanted(how, args))
      continue;
    for (auto& row : stage_rows()) {
      auto mine = args;
      set(mine, how);
      mine.set(fmt::format("--schedule={}", row.schedule));
      mine.set(fmt::format("--ranks={}", row.ranks));
      mine.set(fmt::format("--chunks={}", row.chunks));
      mine.set(fmt::format("--microbatches={}", row.microbatches));
      const stage_task x{mine};
      auto found = run_fresh(dir, x.ranks, "stages", mine);
      auto percent = [&](double seconds) { return 100 * x.bubble(seconds); };
      auto theory = 100 * x.theory();
      auto middle = percent(median(found["step"]));
      auto checker = percent(found["makespan"].front());
      auto expected = x.touch ? checker : theory;
      auto note = std::abs(middle - expected) <= points ? "yes" : "no";
      auto recorded = how.arguments.empty() || minimum(found["replayed"]) > 0;
      fmt::print(
        "  {:<12} {:<17}{:>3}{:>3}{:>7.1f}{:>8.1f}{:>7.1f}{:>7.1f}"
        "{:>6.1f}{:>8.3f}{:>8.3f}{:>8.1f}  {}{}\n",
        how.text, x.schedule, x.ranks, x.microbatches, theory, checker,
        percent(minimum(found["step"])), middle, middle - expected,
        x.busy() / (1 - x.theory()), median(found["step"]),
        1e3 * median(found["late"]), note, recorded ? "" : ", not replayed");
      std::fflush(stdout);
    }
  }
}

// -- a real job, and its peer -------------------------------------------------

/// @returns a Python with torch, or nothing
std::string python() {
  auto* x = std::getenv("SMP_PYTHON");
  return x ? x : "";
}

std::string peer_script() {
  auto here = std::filesystem::path{__FILE__}.parent_path();
  return here / "torch_pipelining.py";
}

figures run_peer(const scratch& dir, uint64_t processes, arguments args) {
  const gpt_sizes sizes{.width = args.number("width", 256)};
  args.set(fmt::format("--layers={}", sizes.layers));
  args.set(fmt::format("--heads={}", sizes.heads));
  args.set(fmt::format("--length={}", sizes.length));
  args.set(fmt::format("--vocabulary={}", sizes.vocabulary));
  args.set(fmt::format("--batch={}", gpt_job::batch));
  args.set(fmt::format("--microbatches={}", gpt_job::microbatches));
  args.set("--rendezvous=" + std::string{dir / "rendezvous"});
  std::filesystem::remove(dir / "rendezvous");
  return run_program(dir, processes, {python(), peer_script()}, args);
}

struct contestant {
  std::string text;
  std::function<figures()> run;
  double share = 1; // ideal share of the time of one process
  figures result = {};
};

/// smp in each mode, the peer if there is one, and one process of each; that of
/// smp comes first and the peer last. @pre `dir` and `args` outlive the result
std::vector<contestant> contestants(const scratch& dir, const arguments& args) {
  auto p = gpt_job::ranks_of(args);
  std::vector<contestant> xs;
  xs.push_back(
    {"one process, LibTorch", [&] { return run_fresh(dir, 1, "one", args); }});
  auto add = [&](const mode& how, const char* schedule, uint64_t chunks) {
    if (!wanted(how, args))
      return;
    auto mine = args;
    set(mine, how);
    mine.set(fmt::format("--schedule={}", schedule));
    mine.set(fmt::format("--chunks={}", chunks));
    xs.push_back(
      {fmt::format("smp {}, {}", schedule, how.text),
       [&dir, mine, p] { return run_fresh(dir, p, "pipeline", mine); },
       gpt_job::ideal(p, gpt_job::processors(args))});
  };
  for (auto& how : modes())
    add(how, "1f1b", 1);
  // Half the bubble of the others; printed relative to their ideal.
  add(modes()[2], "interleaved_1f1b", 2);
  if (!python().empty()) {
    xs.push_back(
      {"one process, PyTorch", [&] { return run_peer(dir, 1, args); }});
    xs.push_back({"torch.distributed.pipelining 1F1B",
                  [&dir, &args, p] { return run_peer(dir, p, args); },
                  gpt_job::ideal(p, gpt_job::processors(args))});
  }
  return xs;
}

/// Prints how long a step of a GPT takes each of them.
void compare(const scratch& dir, arguments args, int64_t width) {
  args.set(fmt::format("--width={}", width));
  auto xs = contestants(dir, args);
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i)
    for (auto& x : xs)
      x.result.add(x.run());
  fmt::print(
    "\nGPT of width {}, {} layers, sequence {}, batch {}, {} "
    "microbatches, {} ranks of one thread each\n"
    "  {:<36}{:>9}{:>9}{:>17}{:>17}\n"
    "  {:<36}{:>9}{:>9}{:>9}{:>8}{:>9}{:>8}\n",
    width, gpt_sizes{}.layers, gpt_sizes{}.length, gpt_job::batch,
    gpt_job::microbatches, gpt_job::ranks_of(args), "", "step, s", "",
    "over the ideal", "over the peer", "", "min", "median", "min", "median",
    "min", "median");
  auto& one = xs.front().result["step"];
  for (auto& x : xs) {
    auto& mine = x.result["step"];
    fmt::print("  {:<36}{:>9.4f}{:>9.4f}", x.text, minimum(mine), median(mine));
    fmt::print("{:>9.3f}{:>8.3f}", minimum(mine) / (x.share * minimum(one)),
               median(mine) / (x.share * median(one)));
    if (!python().empty()) {
      auto& peer = xs.back().result["step"];
      fmt::print("{:>9.3f}{:>8.3f}", minimum(mine) / minimum(peer),
                 median(mine) / median(peer));
    }
    fmt::print("\n");
  }
  fmt::print(
    "  ideal: (m + p - 1) / (m p) of one process with LibTorch, no less than "
    "its part of the cores; load of the machine: {:.1f}\n",
    machine_load());
  std::fflush(stdout);
}

// -- main ---------------------------------------------------------------------

void run(const arguments& args) {
  auto what = args.text("run");
  if (what == "stages")
    return run_stages(args);
  if (args.number("pin", 0) != 0 && !what.empty())
    gpt_job::pin();
  if (what == "pipeline")
    return gpt_job::run_pipeline(args);
  if (what == "one")
    return gpt_job::run_plain(args, 1);
  scratch dir;
  if (args.number("stages", 1) != 0)
    measure_stages(dir, args, 3);
  if (args.number("peer", 1) == 0)
    return;
  if (python().empty())
    fmt::print(
      "\nno Python with torch: './dev zoo' makes one, or set "
      "SMP_PYTHON; so without torch.distributed.pipelining\n");
  auto only = args.number("width", 0);
  for (int64_t width : {256, 64})
    if (only == 0 || only == width)
      compare(dir, args, width);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
