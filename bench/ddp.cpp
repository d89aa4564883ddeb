// The gain of two replicas over one process:
//
//   bench_ddp [--width=N] [--rounds=N] [--steps=N] [--warmup=N] [--pin=1]
//             [--bucket=MB] [--only=offload|saves|pipeline]
//
// Training steps (forward, backward, AdamW) of a GPT on one batch, in one
// process without smp and on two replicas of one thread each with half of the
// batch, in alternating runs, so that other load on the machine affects all of
// them. For comparison the same with torch's DistributedDataParallel over gloo,
// if SMP_PYTHON names a Python that has it (bench/torch_ddp.py). The column
// `early` is the number of buckets that begin before a step ends.
//
// Then the cost of recomputing activations, compared with a step with one
// forward phase more, and of keeping the arguments of that in a file
// meanwhile: one process, all forward phases before the first backward. And
// the speed of the file alone, as bytes given and taken back over time; the
// system keeps a copy in memory if it can. Last, how long a checkpoint holds
// up two replicas.
//
// Only on request, --only=pipeline compares two replicas of two ranks each with
// and without smp.overlapping_allreduce: on fewer than four cores, such times
// mean little.
//
// On a shared machine, --pin=1 keeps each rank on a core of its own.

#include "bench/gpt_job.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/optimizer/fused_update.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace smp::bench {

namespace {

using namespace gpt_job;

constexpr uint64_t ranks = 2;

session_config replicas_of(const arguments& args) {
  session_config result;
  result.pipeline_parallel_degree = static_cast<uint64_t>(args.number("pp", 1));
  result.print_partition = false;
  result.ddp = true;
  result.microbatches = microbatches / ranks;
  result.threads = 1;
  result.overlapping_allreduce = args.number("overlap", 1) != 0;
  result.bucket_cap_mb = static_cast<uint64_t>(args.number("bucket", 25));
  result.shard_optimizer_state = args.number("shard", 0) > 0;
  result.shard_gradients = args.number("shard", 0) > 1;
  return result;
}

void run_replicas(const arguments& args) {
  const task x{args};
  session s{replicas_of(args)};
  const data d{x};
  torch::manual_seed(1);
  distributed_model model{gpt{model_of(x.sizes)}};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  distributed_optimizer optimizer{adamw, {.fused = true}};
  auto train_step = step([&](torch::Tensor tokens, torch::Tensor targets) {
    auto loss = loss_of(model(tokens), targets);
    model.backward(loss);
    return loss;
  });
  model.partition();
  auto tokens = d.tokens.chunk(ranks).at(dp_rank());
  auto targets = d.targets.chunk(ranks).at(dp_rank());
  figures result;
  clock::time_point updates;
  const auto saves = args.number("saves", 0) != 0; // after each step
  uint64_t steps = 0;
  saved_checkpoint saved;
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      train_step(tokens, targets);
      updates = clock::now();
      optimizer.step();
      if (saves)
        saved = save_checkpoint(args.text("file") + ".checkpoints", ++steps,
                                model, {&optimizer});
    },
    [&] {
      result.numbers["save"].push_back(saved.seconds);
      result.numbers["bytes"].push_back(static_cast<double>(saved.bytes));
      result.numbers["update"].push_back(
        seconds_between(updates, clock::now()));
      // The first steps learn what to expect.
      auto counts = model.state().buckets()->take_counts();
      result.numbers["gradients"].push_back(
        static_cast<double>(counts.peak_bytes));
      result.numbers["early"].push_back(
        static_cast<double>(counts.begun_early));
    });
  if (s.rank() == 0)
    write(result, args.text("file"));
}

/// The update alone, in one process.
void run_update(const arguments& args) {
  at::set_num_threads(1);
  const task x{args};
  torch::manual_seed(1);
  plain_gpt model{x.sizes};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  for (auto& p : model->parameters())
    p.mutable_grad() = torch::randn_like(p);
  figures result;
  auto fused = args.number("fused", 0) != 0;
  repeat(
    x, result, [&] { fused ? update_fused(adamw) : (void)adamw.step(); },
    [] {});
  write(result, args.text("file"));
}

// -- activations in a file ----------------------------------------------------

/// A pipeline of one rank; --again=1 computes all twice, --again=2 only blocks
/// again, --again=3 with their arguments in a file.
void run_blocks(const arguments& args) {
  const task x{args};
  const auto again = args.number("again", 0);
  session_config config;
  config.microbatches = microbatches;
  config.pipeline = "simple";
  config.threads = 1;
  if (again > 1)
    config.activation_checkpointing.modules = {"transformer.h"};
  config.offload_activations = again > 2;
  session s{config};
  const data d{x};
  torch::manual_seed(1);
  distributed_model model{gpt{model_of(x.sizes)}};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  distributed_optimizer optimizer{adamw, {.fused = true}};
  auto train_step = step([&](torch::Tensor tokens, torch::Tensor targets) {
    if (again == 1) {
      torch::NoGradGuard no_grad;
      loss_of(model(tokens), targets);
    }
    auto loss = loss_of(model(tokens), targets);
    model.backward(loss);
    return loss;
  });
  figures result;
  auto moved = [&] {
    auto* store = s.internals().offload();
    auto counts = store ? store->status() : offload_store::counts{};
    return static_cast<double>(counts.written + counts.read);
  };
  auto before = 0.0;
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      before = moved();
      train_step(d.tokens, d.targets);
      optimizer.step();
    },
    [&] {
      result.numbers["moved"].push_back(moved() - before);
      result.numbers["wait"].push_back(s.last_step().offload_wait_seconds);
    });
  write(result, args.text("file"));
}

/// The file alone: 256 MB there and back, in tensors of 4 MB.
void run_file(const arguments& args) {
  constexpr int64_t sets = 64;
  constexpr uint64_t bytes = 4 << 20;
  const auto dir = default_offload_dir();
  figures result;
  for (int64_t round = 0; round < args.number("steps", 10); ++round) {
    auto store = offload_store::make(open_offload_file(dir),
                                     {.dir = dir, .warn = {}, .device = {}});
    std::vector<c10::Storage> memory;
    for (int64_t i = 0; i < sets; ++i)
      memory.push_back(torch::full({bytes}, i, torch::kByte).storage());
    auto begin = clock::now();
    std::vector<std::unique_ptr<offload_store::set>> given;
    for (auto& x : memory)
      given.push_back(store->give(0, {{std::exchange(x, {}), 0, bytes, 0}}));
    while (store->status().written < sets * bytes)
      std::this_thread::yield();
    auto written = clock::now();
    store->announce(0);
    for (auto i = given.rbegin(); i != given.rend(); ++i)
      (*i)->take();
    auto read = clock::now();
    auto rate = [](clock::time_point x, clock::time_point y) {
      return sets * bytes / seconds_between(x, y);
    };
    result.numbers["write"].push_back(rate(begin, written));
    result.numbers["read"].push_back(rate(written, read));
  }
  write(result, args.text("file"));
}

// -- the comparison -----------------------------------------------------------

std::string python() {
  auto* x = std::getenv("SMP_PYTHON");
  return x ? x : "";
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
  auto here = std::filesystem::path{__FILE__}.parent_path();
  return run_program(dir, processes, {python(), here / "torch_ddp.py"}, args);
}

struct contestant {
  std::string text;
  std::function<figures()> run;
  size_t against = 0; // index of the same work in one process
  figures result = {};
};

std::vector<contestant> contestants(const scratch& dir, const arguments& args) {
  auto mine = [&dir, args](uint64_t processes, const char* run,
                           std::vector<std::string> options) {
    return [&dir, args, processes, run, options] {
      auto all = args;
      for (auto& x : options)
        all.set(x);
      return run_fresh(dir, processes, run, all);
    };
  };
  if (args.text("only") == "pipeline")
    return {{"one process without smp", mine(1, "one", {}), 0},
            {"2 replicas of 2 ranks", mine(4, "replicas", {"--pp=2"}), 0},
            {"  averaged at the end of the step",
             mine(4, "replicas", {"--pp=2", "--overlap=0"}), 0}};
  std::vector<contestant> result{
    {"one process without smp", mine(1, "one", {}), 0},
    {"two such processes at once, half the batch", mine(2, "half", {}), 0},
    {"2 replicas", mine(2, "replicas", {}), 0},
    {"  buckets of 2 MB", mine(2, "replicas", {"--bucket=2"}), 0},
    {"  averaged at the end of the step", mine(2, "replicas", {"--overlap=0"}),
     0},
    {"  optimizer state in parts", mine(2, "replicas", {"--shard=1"}), 0},
    {"  gradients in parts as well", mine(2, "replicas", {"--shard=2"}), 0},
    {"  the same, buckets of 2 MB",
     mine(2, "replicas", {"--shard=2", "--bucket=2"}), 0},
  };
  if (python().empty())
    return result;
  auto peer = [&dir, args](uint64_t processes, int shard = 0) {
    return [&dir, args, processes, shard] {
      auto all = args;
      all.set(fmt::format("--shard={}", shard));
      return run_peer(dir, processes, all);
    };
  };
  auto one = result.size();
  result.push_back({"torch, one process", peer(1), one});
  result.push_back({"torch, DDP over gloo", peer(2), one});
  result.push_back({"  optimizer state in parts", peer(2, 1), one});
  return result;
}

void print_updates(const scratch& dir, const arguments& args) {
  figures plain, fused;
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i) {
    auto of = args;
    plain.add(run_fresh(dir, 1, "update", of));
    of.set("--fused=1");
    fused.add(run_fresh(dir, 1, "update", of));
  }
  fmt::print("  {:<44} {:>8} {:>8}\n", "update of one process, ms", "min",
             "median");
  for (auto [text, x] :
       {std::pair{"LibTorch's AdamW", &plain}, std::pair{"fused", &fused}})
    fmt::print("  {:<44} {:>8.3f} {:>8.3f}\n", text,
               1e3 * minimum((*x)["step"]), 1e3 * median((*x)["step"]));
}

void compare(const scratch& dir, arguments args, int64_t width) {
  args.set(fmt::format("--width={}", width));
  auto xs = contestants(dir, args);
  auto before = machine_load();
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i)
    for (auto& x : xs)
      x.result.add(x.run());
  fmt::print(
    "\nGPT of width {}: {} layers, sequence {}, batch {}, {} "
    "microbatches in all\n",
    width, gpt_sizes{}.layers, gpt_sizes{}.length, batch, microbatches);
  fmt::print("  {:<44} {:>8} {:>8} {:>11} {:>8} {:>8} {:>6}\n", "step time, s",
             "min", "median", "throughput", "update", "MB grad", "early");
  for (auto& x : xs) {
    auto& one = xs[x.against].result["step"];
    auto& step = x.result["step"];
    fmt::print("  {:<44} {:>8.4f} {:>8.4f} {:>4.2f} / {:>4.2f}", x.text,
               minimum(step), median(step), minimum(one) / minimum(step),
               median(one) / median(step));
    if (x.result.numbers.contains("update"))
      fmt::print(" {:>8.4f} {:>8.2f} {:>6.0f}", median(x.result["update"]),
                 median(x.result["gradients"]) * 1e-6,
                 median(x.result["early"]));
    fmt::print("\n");
  }
  if (args.text("only").empty())
    print_updates(dir, args);
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
  std::fflush(stdout);
}

void compare_offload(const scratch& dir, const arguments& args, int64_t width) {
  std::array<figures, 4> results;
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i)
    for (size_t again = 0; again < results.size(); ++again) {
      auto of = args;
      of.set(fmt::format("--width={}", width));
      of.set(fmt::format("--again={}", again));
      results[again].add(run_fresh(dir, 1, "blocks", of));
    }
  fmt::print("\nGPT of width {}, one process, {} microbatches forward first\n",
             width, microbatches);
  fmt::print("  {:<44} {:>8} {:>8} {:>8} {:>10} {:>8}\n", "step time, s", "min",
             "median", "of first", "MB moved", "waited");
  std::array texts{"activations in memory", "one forward phase more",
                   "blocks computed again", "  their arguments in a file"};
  for (size_t i = 0; i < results.size(); ++i) {
    auto& x = results[i];
    fmt::print("  {:<44} {:>8.4f} {:>8.4f} {:>7.3f}x {:>10.1f} {:>8.4f}\n",
               texts[i], minimum(x["step"]), median(x["step"]),
               median(x["step"]) / median(results[0]["step"]),
               median(x["moved"]) * 1e-6, median(x["wait"]));
  }
}

void print_saves(const scratch& dir, const arguments& args, int64_t width) {
  figures alone, saves;
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i) {
    auto of = args;
    of.set(fmt::format("--width={}", width));
    alone.add(run_fresh(dir, ranks, "replicas", of));
    of.set("--saves=1");
    std::filesystem::remove_all(dir / "figures.checkpoints"); // of the last one
    saves.add(run_fresh(dir, ranks, "replicas", of));
  }
  fmt::print("\nGPT of width {}, 2 replicas, a checkpoint after each step\n",
             width);
  fmt::print("  {:<44} {:>8} {:>8} {:>8} {:>8}\n", "median, s", "step",
             "held up", "MB", "MB/s");
  auto bytes = median(saves["bytes"]);
  fmt::print("  {:<44} {:>8.4f}\n", "none", median(alone["step"]));
  fmt::print("  {:<44} {:>8.4f} {:>8.4f} {:>8.1f} {:>8.0f}\n", "each step",
             median(saves["step"]), median(saves["save"]), bytes * 1e-6,
             bytes * 1e-6 / median(saves["save"]));
  std::fflush(stdout);
}

void print_file(const scratch& dir, const arguments& args) {
  figures result;
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i)
    result.add(run_fresh(dir, 1, "file", args));
  fmt::print("\nthe file of offloading alone, in {}\n", default_offload_dir());
  fmt::print("  {:<44} {:>8} {:>8}\n", "MB/s", "median", "max");
  for (auto name : {"write", "read"}) {
    auto& x = result[name];
    fmt::print("  {:<44} {:>8.0f} {:>8.0f}\n", name, median(x) * 1e-6,
               *std::ranges::max_element(x) * 1e-6);
  }
  std::fflush(stdout);
}

void run(const arguments& args) {
  auto what = args.text("run");
  if (args.number("pin", 0) != 0 && !what.empty())
    pin();
  if (what == "replicas")
    return run_replicas(args);
  if (what == "update")
    return run_update(args);
  if (what == "one")
    return run_plain(args, 1);
  if (what == "half")
    return run_plain(args, 1, ranks);
  if (what == "blocks")
    return run_blocks(args);
  if (what == "file")
    return run_file(args);
  scratch dir;
  auto width = args.number("width", 0);
  std::vector<int64_t> widths{256, 64};
  if (width > 0)
    widths = {width};
  auto only = args.text("only");
  for (auto x : widths)
    if (only.empty() || only == "pipeline")
      compare(dir, args, x);
  for (auto x : widths)
    if (only.empty() || only == "offload")
      compare_offload(dir, args, x);
  if (only.empty() || only == "offload")
    print_file(dir, args);
  for (auto x : widths)
    if (only.empty() || only == "saves")
      print_saves(dir, args, x);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
