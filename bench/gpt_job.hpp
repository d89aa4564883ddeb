#pragma once

// The training job that benchmarks compare: AdamW steps of a GPT in 8
// microbatches, by smp over --ranks=2 and by one process without smp.

#include "bench/harness.hpp"
#include "bench/plain_gpt.hpp"

#include "runtime/device/rank_device.hpp"
#include "runtime/train/models/gpt.hpp"
#include "smp/smp.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include <sched.h>
#include <sys/resource.h>

namespace smp::bench::gpt_job {

using clock = std::chrono::steady_clock;

constexpr uint64_t microbatches = 8; // m
constexpr int64_t batch = 32;

inline uint64_t ranks_of(const arguments& x) {
  return static_cast<uint64_t>(x.number("ranks", 2)); // p
}

/// @returns how many cores or devices there are
inline uint64_t processors(const arguments& x) {
  auto device = choose_device(device_name(x), 0);
  if (!device)
    return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<uint64_t>(
    c10::impl::VirtualGuardImpl{device->get().type()}.deviceCount());
}

/// @returns the least share of one process's time that `p` ranks can take. They
/// must fill and drain; where they share processors, those are a bound as well.
inline double ideal(uint64_t p, uint64_t processors) {
  auto of_the_pipeline = double(microbatches + p - 1)
                         / double(microbatches * p);
  return std::max(of_the_pipeline, 1.0 / double(processors));
}

inline double seconds_between(clock::time_point x, clock::time_point y) {
  return std::chrono::duration<double>(y - x).count();
}

/// How steps run: --static=1 replays a recorded one, --fast=0 waits for each
/// call; otherwise as by default.
inline void set_modes(const arguments& x, session_config& result) {
  result.static_mode = x.number("static", 0) != 0;
  if (auto fast = x.number("fast", -1); fast >= 0)
    result.fast_mode = fast != 0;
  result.deterministic_server = x.number("deterministic", 0) != 0;
}

/// What every run trains.
struct task {
  explicit task(const arguments& x)
    : ranks(ranks_of(x)),
      warmup(x.number("warmup", 3)),
      steps(x.number("steps", 10)),
      schedule(x.text("schedule", "interleaved")),
      chunks(static_cast<uint64_t>(x.number("chunks", 1))) {
    if (auto n = x.number("active", 0); n > 0)
      active = static_cast<uint64_t>(n);
    sizes.width = x.number("width", sizes.width);
  }

  gpt_sizes sizes;
  uint64_t ranks;
  int64_t warmup;
  int64_t steps;
  std::string schedule;
  uint64_t chunks;
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

inline torch::optim::AdamWOptions optimizer_options() {
  return torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
}

/// logits: [B, T, V], targets: [B, T]
inline torch::Tensor loss_of(const torch::Tensor& logits,
                             const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              targets.flatten());
}

/// What a process has used since its start.
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
  /// In seconds; a lack of cores is not a fault of what is measured
  double waited = waited_for_a_core();
};

/// Runs `step` repeatedly, and after the warm-up records how long each one
/// took, from its begin to the begin of the next, and what it used.
template <class Step, class Note>
void repeat(const task& x, figures& result, Step step, Note note) {
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

/// @param share runs one `share`-th of the batch
inline void run_plain(const arguments& args, int threads, uint64_t share = 1) {
  at::set_num_threads(threads);
  const task x{args};
  const data d{x};
  torch::manual_seed(1);
  plain_gpt model{x.sizes};
  auto chosen = choose_device(device_name(args), 0);
  const auto device = chosen ? chosen->get() : at::Device{at::kCPU};
  model->to(device);
  torch::optim::AdamW optimizer{model->parameters(), optimizer_options()};
  figures result;
  double loss = 0;
  auto tokens = d.tokens.to(device).chunk(microbatches);
  auto targets = d.targets.to(device).chunk(microbatches);
  repeat(
    x, result,
    [&] {
      optimizer.zero_grad();
      torch::Tensor sum;
      for (uint64_t i = 0; i < microbatches / share; ++i) {
        auto part = loss_of(model(tokens[i]), targets[i])
                    / double(microbatches / share);
        part.backward();
        sum = sum.defined() ? sum + part.detach() : part.detach();
      }
      optimizer.step();
      loss = sum.item<double>();
    },
    [&] { result.numbers["loss"] = {loss}; });
  auto env = read_rank_environment();
  if (!env || env->rank == 0)
    write(result, args.text("file"));
}

// -- the pipeline -------------------------------------------------------------

inline session_config setup_of(const task& x, const arguments& args) {
  session_config result;
  result.pipeline_parallel_degree = x.ranks;
  result.microbatches = microbatches;
  result.pipeline = x.schedule;
  result.chunks = x.chunks;
  result.active_microbatches = x.active;
  result.threads = 1;
  result.device = device_name(args);
  set_modes(args, result);
  return result;
}

inline model_sizes model_of(const gpt_sizes& x) {
  model_sizes result;
  result.vocabulary = x.vocabulary;
  result.sequence_length = x.length;
  result.layers = x.layers;
  result.heads = x.heads;
  result.width = x.width;
  return result;
}

/// Adds what each rank counted in each step. Collective.
inline void gather(const std::vector<step_stats>& stats, figures& result) {
  auto gather_one = [&](const char* name, double value) {
    auto all = allgather(value);
    for (uint64_t i = 0; i < all.size(); ++i)
      result.numbers[fmt::format("{}.{}", name, i)].push_back(all[i]);
    return all;
  };
  auto mine = result.numbers;
  for (size_t i = 0; i < stats.size(); ++i) {
    auto& x = stats[i];
    auto executing = gather_one("executing", x.executing_seconds);
    auto inside = gather_one("inside", x.seconds);
    gather_one("requests", static_cast<double>(x.requests));
    gather_one("waits", static_cast<double>(x.waits));
    gather_one("bytes", static_cast<double>(x.bytes_sent));
    gather_one("cpu", mine["cpu"][i]);
    gather_one("faults", mine["faults"][i]);
    gather_one("switches", mine["switches"][i]);
    result.numbers["replayed"].push_back(x.replayed ? 1 : 0);
    auto sum = [](const std::vector<double>& xs) {
      return std::accumulate(xs.begin(), xs.end(), 0.0);
    };
    result.numbers["bubble"].push_back(1 - sum(executing) / sum(inside));
  }
}

inline void run_pipeline(const arguments& args) {
  const task x{args};
  session s{setup_of(x, args)};
  const data d{x};
  torch::manual_seed(1);
  distributed_model model{gpt{model_of(x.sizes)}};
  torch::optim::AdamW adamw{model->parameters(), optimizer_options()};
  distributed_optimizer optimizer{adamw};
  auto train_step = step([&](torch::Tensor tokens, torch::Tensor targets) {
    auto loss = loss_of(model(tokens), targets);
    model.backward(loss);
    return loss;
  });
  model.partition();
  figures result;
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
  gather(stats, result);
  if (s.rank() == 0)
    write(result, args.text("file"));
}

// -- cores --------------------------------------------------------------------

/// Pins this process to the core whose number is its rank.
inline void pin() {
  auto env = read_rank_environment();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(env ? env->rank : 0, &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

} // namespace smp::bench::gpt_job
