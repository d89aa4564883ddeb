// The costs and savings of modules that tensor-parallel ranks share:
//
//   bench_tp [--part=abc] [--width=N] [--rounds=N] [--steps=N] [--warmup=N]
//            [--users=N] [--items=N] [--ranks=N]
//
// (a) Training steps of a GPT whose blocks two ranks of one thread each share,
// for memory and for speed, in one process of two threads, and by
// torch.distributed.tensor.parallel (ColwiseParallel and RowwiseParallel over
// gloo), in alternating runs.
//
// (b) What a rank keeps for backward of a layer of such a GPT, compared with
// equation 4 of Korthikanti et al. 2022 and with one process divided by the
// ranks, and what it sends, for both kinds of sharing, by two and four ranks.
//
// (c) Neural collaborative filtering (paper, section 7.4): four ranks, or
// --ranks, share the four tables, and each takes samples of its own through the
// rest. For comparison the same batch on all of them (smp.prescaled_batch), so
// that the tables need less exchange and all else is computed by each rank, by
// smp and by torch. There are as many users as in the paper if memory allows,
// else a tenth. The result of 16 ranks, as many as in the paper, is predicted
// from the costs of the partition (docs/partition.md).
//
// The bytes that a rank sends are compared with the formulas of
// docs/shared_modules.md plus the mean of gradients that are not shared.

#include "bench/gpt_job.hpp"
#include "bench/shared_layers.hpp"

#include "runtime/plan/planner.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/models/ncf.hpp"

#include <torch/optim/sgd.h>

#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <thread>

namespace smp::bench {

namespace {

using namespace gpt_job;

// -- (a) a GPT ----------------------------------------------------------------

constexpr uint64_t gpt_peers = 2;

/// @returns bytes that a rank sends to average `numbers` over all ranks
double bytes_of_mean(double numbers, uint64_t ranks) {
  auto n = static_cast<double>(ranks);
  return 2 * (n - 1) / n * numbers * sizeof(float);
}

/// @returns the numbers in parameters outside of `prefix`
double numbers_outside(const torch::nn::Module& model,
                       const std::string& prefix) {
  double result = 0;
  for (auto& p : model.named_parameters())
    if (!p.key().starts_with(prefix))
      result += static_cast<double>(p.value().numel());
  return result;
}

/// @returns bytes that a rank sends in a step for shared blocks
double bytes_of_blocks(const gpt_sizes& x, const std::string& optimize) {
  constexpr double peers = gpt_peers;
  const auto rows = batch / peers * static_cast<double>(x.length);
  const auto width = static_cast<double>(x.width);
  const auto layers = static_cast<double>(x.layers);
  const auto result = layers
                      * shared_layers::bytes_of_layer(rows, width, peers,
                                                      optimize);
  if (optimize == "speed")
    return result;
  // Between two layers, all four scatter-and-merge are left out.
  return result
         - 4 * (layers - 1) * (peers - 1) / peers * rows * width
             * sizeof(float);
}

void run_shared_gpt(const arguments& args) {
  const task x{args};
  const auto optimize = args.text("optimize", "memory");
  session s{{.microbatches = microbatches,
             .optimize = optimize,
             .ddp = true,
             .tensor_parallel_degree = gpt_peers,
             .tensor_parallel_modules = {"transformer.h"},
             .threads = 1,
             .print_partition = false}};
  const data all{x};
  auto mine = [&](const torch::Tensor& t) {
    return t.chunk(gpt_peers)[static_cast<size_t>(dp_rank())];
  };
  torch::manual_seed(1);
  distributed_model model{gpt{model_of(x.sizes)}};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  distributed_optimizer optimizer{adamw};
  const auto formula = bytes_of_blocks(x.sizes, optimize)
                       + bytes_of_mean(
                         numbers_outside(*model, "transformer.h."), gpt_peers);
  auto train_step = step([&](torch::Tensor tokens, torch::Tensor targets) {
    auto loss = loss_of(model(tokens), targets);
    model.backward(loss);
    return loss;
  });
  model.partition();
  figures result;
  result.text = model.partition_text();
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      train_step(mine(all.tokens), mine(all.targets));
      optimizer.step();
    },
    [&] {
      result.numbers["sent"].push_back(double(s.last_step().bytes_sent));
      result.numbers["formula"].push_back(formula);
    });
  if (s.rank() == 0)
    write(result, args.text("file"));
}

// -- (c) neural collaborative filtering ---------------------------------------

constexpr int64_t ncf_batch = 1024;   // of all ranks
constexpr int64_t ncf_users = 318133; // of the paper
constexpr uint64_t ncf_of_paper = 16; // ranks

uint64_t ncf_peers(const arguments& args) {
  return static_cast<uint64_t>(args.number("ranks", 4));
}

std::set<uint64_t> ncf_predicted(const arguments& args) {
  return {ncf_peers(args), ncf_of_paper};
}

model_sizes ncf_sizes(const arguments& args) {
  // The widths of the paper: 64 for the product, 512 for the network.
  return {.layers = 4,
          .width = 64,
          .users = args.number("users", ncf_users),
          .items = args.number("items", 1792)};
}

/// Bytes that a rank sends in a step for tables `width` wide together and for
/// `outside` other numbers.
struct ncf_traffic {
  double tables = 4;
  double width = 0;
  double outside = 0;

  /// Tables by channels: each rank gets the missing parts of its samples' rows.
  double shared(double ranks) const {
    auto samples = ncf_batch / ranks;
    return 2 * (ranks - 1) / ranks * samples * width * sizeof(float)
           + (ranks - 1) * samples * tables * sizeof(int64_t)
           + bytes_of_mean(outside, static_cast<uint64_t>(ranks));
  }

  /// All ranks get the rows of all samples. Gradients of the rest are averaged,
  /// although they are the same.
  double repeated(double ranks) const {
    return (ranks - 1) / ranks * ncf_batch * width * sizeof(float)
           + bytes_of_mean(outside, static_cast<uint64_t>(ranks));
  }
};

ncf_traffic traffic_of(const torch::nn::Module& model) {
  ncf_traffic result{.tables = 0};
  for (auto& p : model.named_parameters())
    if (p.key().starts_with("embed_")) {
      result.width += static_cast<double>(p.value().size(1));
      ++result.tables;
    }
  result.outside = numbers_outside(model, "embed_");
  return result;
}

/// One process and thread, without smp.
void run_lone_ncf(const arguments& args) {
  const task x{args};
  at::set_num_threads(1);
  const auto sizes = ncf_sizes(args);
  torch::manual_seed(1);
  ncf model{sizes};
  torch::optim::SGD sgd{model->parameters(), 0.01};
  auto users = torch::randint(sizes.users, {ncf_batch});
  auto items = torch::randint(sizes.items, {ncf_batch});
  auto labels = torch::randint(2, {ncf_batch}).to(torch::kFloat);
  figures result;
  result.numbers["outside"] = {numbers_outside(*model, "embed_")};
  repeat(
    x, result,
    [&] {
      sgd.zero_grad();
      torch::binary_cross_entropy_with_logits(model(users, items), labels)
        .backward();
      sgd.step();
    },
    [] {});
  write(result, args.text("file"));
}

/// --same=1: with the same samples on all ranks.
void run_shared_ncf(const arguments& args) {
  const task x{args};
  const auto same = args.number("same", 0) != 0;
  const auto peers = ncf_peers(args);
  session s{{.ddp = true,
             .tensor_parallel_degree = peers,
             .tensor_parallel_modules = {"embed_*"},
             .prescaled_batch = same,
             .threads = 1,
             .print_partition = false}};
  const auto sizes = ncf_sizes(args);
  torch::manual_seed(1);
  auto made = [&] {
    delay_param_initialization scope; // no rank has whole tables
    return ncf{sizes};
  }();
  distributed_model model{made};
  torch::optim::SGD sgd{model->parameters(), 0.01};
  distributed_optimizer optimizer{sgd};
  const auto traffic = traffic_of(*model);
  const auto formula = same ? traffic.repeated(static_cast<double>(peers))
                            : traffic.shared(static_cast<double>(peers));
  auto train_step = step(
    [&](torch::Tensor users, torch::Tensor items, torch::Tensor labels) {
      auto loss = torch::binary_cross_entropy_with_logits(model(users, items),
                                                          labels);
      model.backward(loss);
      return loss;
    });
  model.partition();
  torch::manual_seed(7 + data_rank());
  const auto rows = ncf_batch / static_cast<int64_t>(data_size());
  auto users = torch::randint(sizes.users, {rows});
  auto items = torch::randint(sizes.items, {rows});
  auto labels = torch::randint(2, {rows}).to(torch::kFloat);
  figures result;
  result.text = model.partition_text();
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      train_step(users, items, labels);
      optimizer.step();
    },
    [&] {
      result.numbers["sent"].push_back(double(s.last_step().bytes_sent));
      result.numbers["formula"].push_back(formula);
    });
  if (s.rank() == 0)
    write(result, args.text("file"));
}

/// Records by number of ranks the cost that the partition computes for a
/// microbatch of --samples on each, in seconds. --same=1: all have the same.
void run_cost_of_ncf(const arguments& args) {
  const auto sizes = ncf_sizes(args);
  train_config x;
  x.smp.ddp = true;
  x.smp.tensor_parallel_degree = ncf_peers(args);
  x.ranks = x.smp.tensor_parallel_degree;
  x.smp.tensor_parallel_modules = {"embed_*"};
  x.smp.threads = 1;
  x.model.type = "ncf";
  x.model.users = static_cast<uint64_t>(sizes.users);
  x.model.items = static_cast<uint64_t>(sizes.items);
  x.model.layers = static_cast<uint64_t>(sizes.layers);
  x.model.width = static_cast<uint64_t>(sizes.width);
  x.data.type = "synthetic";
  x.data.batch_size = static_cast<uint64_t>(args.number("samples", ncf_batch));
  x.train.steps = 1;
  figures result;
  decide_alone(x, [&](lone_decision& run) {
    for (auto ranks : ncf_predicted(args)) {
      const sharing_request how{.patterns = x.smp.tensor_parallel_modules,
                                .peers = ranks,
                                .prescaled = args.number("same", 0) != 0};
      auto decision = run.state.decide(1, 0, how);
      result.numbers[std::to_string(ranks)] = {
        decision.plan.options.step_seconds};
    }
  });
  write(result, args.text("file"));
}

// -- the peers ----------------------------------------------------------------

/// @returns a Python with torch, or nothing
std::string python() {
  auto* x = std::getenv("SMP_PYTHON");
  return x ? x : "";
}

figures run_peer(const scratch& dir, uint64_t processes, const char* job,
                 arguments args) {
  auto script = std::filesystem::path{__FILE__}.parent_path()
                / "torch_tensor_parallel.py";
  const gpt_sizes gpt{.width = args.number("width", 256)};
  const auto ncf = ncf_sizes(args);
  auto set = [&](const char* key, int64_t value) {
    args.set(fmt::format("--{}={}", key, value));
  };
  set("width", gpt.width);
  set("layers", gpt.layers);
  set("heads", gpt.heads);
  set("length", gpt.length);
  set("vocabulary", gpt.vocabulary);
  set("batch", batch);
  set("microbatches", microbatches);
  set("users", ncf.users);
  set("items", ncf.items);
  set("samples", ncf_batch);
  args.set(fmt::format("--job={}", job));
  args.set("--rendezvous=" + std::string{dir / "rendezvous"});
  std::filesystem::remove(dir / "rendezvous");
  return run_program(dir, processes, {python(), script}, args);
}

// -- the comparison -----------------------------------------------------------

struct contestant {
  std::string text;
  std::function<figures()> run;
  figures result = {};
};

/// Prints how long a step takes each of them, relative to the first one.
void compare(std::vector<contestant>& xs, int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i)
    for (auto& x : xs)
      x.result.add(x.run());
  fmt::print(
    "{}\n  {:<46}{:>9}{:>9}{:>17}{:>17}\n"
    "  {:<46}{:>9}{:>9}{:>9}{:>8}{:>9}{:>8}\n",
    xs.front().result.text, "", "step, s", "", "the first over it",
    "a rank sends, MB", "", "min", "median", "min", "median", "", "formula");
  auto& first = xs.front().result["step"];
  for (auto& x : xs) {
    auto& mine = x.result["step"];
    fmt::print("  {:<46}{:>9.4f}{:>9.4f}{:>9.3f}{:>8.3f}", x.text,
               minimum(mine), median(mine), minimum(first) / minimum(mine),
               median(first) / median(mine));
    if (x.result.numbers.contains("sent"))
      fmt::print("{:>9.2f}{:>8.2f}", 1e-6 * median(x.result["sent"]),
                 1e-6 * median(x.result["formula"]));
    fmt::print("\n");
  }
  fmt::print("  load of the machine: {:.1f}\n", machine_load());
  std::fflush(stdout);
}

void compare_gpt(const scratch& dir, arguments args, int64_t width) {
  args.set(fmt::format("--width={}", width));
  auto for_speed = args;
  for_speed.set("--optimize=speed");
  std::vector<contestant> xs{
    {"smp, blocks shared by 2 ranks, for memory",
     [&] { return run_fresh(dir, gpt_peers, "gpt", args); }},
    {"smp, blocks shared by 2 ranks, for speed",
     [&] { return run_fresh(dir, gpt_peers, "gpt", for_speed); }},
    {"one process of two threads",
     [&] { return run_fresh(dir, 1, "two", args); }}};
  if (!python().empty())
    xs.push_back({"torch.distributed.tensor.parallel, 2 ranks",
                  [&] { return run_peer(dir, gpt_peers, "gpt", args); }});
  fmt::print(
    "\n(a) GPT of width {}: {} layers, sequence {}, batch {} in {} "
    "microbatches; ranks of one thread\n",
    width, gpt_sizes{}.layers, gpt_sizes{}.length, batch, microbatches);
  compare(xs, args.number("rounds", 3));
}

/// Prints a prediction for ranks with a core each. A microbatch, with the
/// exchange for the tables, takes the partition's cost. In addition, a step
/// averages the other gradients, at the same rate, and spends the time that is
/// due to large tables: as one process measures it, divided by the ranks.
void predict_ncf(const scratch& dir, arguments args) {
  // With fewer samples, the partition would measure only noise.
  constexpr int64_t least_samples = 256;
  const auto whole = run_fresh(dir, 1, "lone_ncf", args);
  args.set("--users=16");
  args.set("--items=16");
  const auto network = run_fresh(dir, 1, "lone_ncf", args);
  const auto tables = std::max(0.0, minimum(whole["step"])
                                      - minimum(network["step"]));
  args.set(fmt::format("--samples={}", least_samples));
  const auto own = run_fresh(dir, 1, "ncf_cost", args);
  args.set(fmt::format("--samples={}", ncf_batch));
  args.set("--same=1");
  const auto same = run_fresh(dir, 1, "ncf_cost", args);
  for (auto ranks : ncf_predicted(args)) {
    const auto name = std::to_string(ranks);
    const auto n = static_cast<double>(ranks);
    const auto both = tables / n
                      + bytes_of_mean(whole["outside"][0], ranks)
                          / communication::rate;
    const auto mine = ncf_batch / n / least_samples * own[name][0] + both;
    const auto other = same[name][0] + both;
    fmt::print(
      "  predicted, {} ranks of a core each that send {:.0f} GB/s: {:.2f} "
      "times the throughput of the same samples on all\n",
      ranks, communication::rate / 1e9, other / mine);
  }
}

/// @returns bytes that processes can still allocate; 0: unknown
double available_memory() {
  std::ifstream in{"/proc/meminfo"};
  std::string name, rest;
  for (double kilobytes = 0; in >> name >> kilobytes; std::getline(in, rest))
    if (name == "MemAvailable:")
      return 1024 * kilobytes;
  return 0;
}

/// The memory of all ranks together, which hold the tables and their gradients
/// once, as one process alone does.
double needed_memory(const model_sizes& x, uint64_t ranks) {
  constexpr double process = 512e6;
  const auto width = x.width * (1 + (int64_t{1} << (x.layers - 1)));
  const auto tables = static_cast<double>((x.users + x.items) * width)
                      * sizeof(float);
  return static_cast<double>(ranks) * process + 2 * tables;
}

void compare_ncf(const scratch& dir, arguments args) {
  const auto ranks = ncf_peers(args);
  if (args.text("users").empty()
      && needed_memory(ncf_sizes(args), ranks) > available_memory())
    args.set(fmt::format("--users={}", ncf_users / 10));
  const auto x = ncf_sizes(args);
  auto repeated = args;
  repeated.set("--same=1");
  std::vector<contestant> xs{
    {fmt::format("smp, tables shared by {} ranks, own samples", ranks),
     [&] { return run_fresh(dir, ranks, "ncf", args); }},
    {fmt::format("smp, the same samples on all {}", ranks),
     [&] { return run_fresh(dir, ranks, "ncf", repeated); }}};
  if (!python().empty())
    xs.push_back(
      {fmt::format("torch, {} ranks, tables cut, the same samples", ranks),
       [&] { return run_peer(dir, ranks, "ncf", args); }});
  fmt::print(
    "\n(c) NCF: {} users (in the paper {}), {} items, {} samples; ranks of one "
    "thread\n",
    x.users, ncf_users, x.items, ncf_batch);
  compare(xs, args.number("rounds", 3));
  auto& mine = xs[0].result["step"];
  auto& other = xs[1].result["step"];
  fmt::print(
    "  measured, {} ranks on {} cores: {:.2f} times the throughput of the same "
    "samples on all by the minima, {:.2f} by the medians\n",
    ranks, std::thread::hardware_concurrency(), minimum(other) / minimum(mine),
    median(other) / median(mine));
  predict_ncf(dir, args);
}

void run(const arguments& args) {
  auto what = args.text("run");
  if (what == "gpt")
    return run_shared_gpt(args);
  if (what == "two")
    return run_plain(args, 2);
  if (what == "layers")
    return shared_layers::run_layers(args);
  if (what == "ncf")
    return run_shared_ncf(args);
  if (what == "lone_ncf")
    return run_lone_ncf(args);
  if (what == "ncf_cost")
    return run_cost_of_ncf(args);
  scratch dir;
  if (python().empty())
    fmt::print(
      "\nno Python with torch: './dev zoo' makes one, or set "
      "SMP_PYTHON; so without peers\n");
  auto part = args.text("part", "abc");
  auto only = args.number("width", 0);
  if (part.find('a') != part.npos)
    for (int64_t width : {256, 512})
      if (only == 0 || only == width)
        compare_gpt(dir, args, width);
  if (part.find('b') != part.npos)
    for (int64_t width : {256, 512})
      if (only == 0 || only == width)
        shared_layers::count(dir, args, width);
  if (part.find('c') != part.npos)
    compare_ncf(dir, args);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
