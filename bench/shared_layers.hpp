#pragma once

// Part (b) of bench_tp: what a rank keeps for backward and sends for a
// transformer layer that ranks share, next to formulas. All of it is counted,
// so runs need not alternate. One step calls the layers once, the next one
// twice: what the second call adds is due to the layers alone.

#include "bench/gpt_job.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/nn/modules/container/sequential.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <malloc.h>

namespace smp::bench::shared_layers {

using namespace gpt_job;

constexpr int64_t layers = 4;
constexpr int64_t samples = 4; // of all ranks

// -- formulas -----------------------------------------------------------------

/// @param rows tokens of a rank's own samples
/// @returns bytes that a rank sends for a layer, forward and backward
/// (docs/shared_modules.md)
inline double bytes_of_layer(double rows, double width, double peers,
                             const std::string& optimize) {
  const auto others = peers - 1;
  if (optimize == "speed")
    return 8 * others * rows * width * sizeof(float);
  const auto exchanged = 2 * (9 * others + 2 * others / peers) * rows * width;
  // Each of two norms gathers three numbers for each token of all ranks, and
  // sums up two in backward.
  const auto moments = 2 * others * (3 * peers + 4) * rows;
  return (exchanged + moments) * sizeof(float);
}

/// Korthikanti et al. 2022, equation 4, without dropout and scores, of which
/// this GPT keeps nothing: 16 numbers for each token and channel.
inline double kept_bytes_of_layer(double tokens, double width, double peers) {
  return 16 * tokens * width * sizeof(float) / peers;
}

// -- a rank -------------------------------------------------------------------

inline std::atomic<int64_t> bytes_of_tensors = 0;

/// Counts the bytes of all tensors, whichever thread frees them.
class counting_allocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* p = bytes == 0 ? nullptr : ::aligned_alloc(64, (bytes + 63) & ~63ull);
    bytes_of_tensors += size_of(p);
    return {p, p, &release, c10::Device{c10::kCPU}};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

private:
  static int64_t size_of(void* p) {
    return p == nullptr ? 0 : static_cast<int64_t>(::malloc_usable_size(p));
  }

  static void release(void* p) {
    bytes_of_tensors -= size_of(p);
    ::free(p);
  }
};

/// Nothing but layers.
struct tower_impl : torch::nn::Module {
  explicit tower_impl(const model_sizes& x) {
    for (int64_t i = 0; i < x.layers; ++i)
      h->push_back(gpt_block(x, i));
    register_module("h", h);
  }

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x) {
    return h->forward(x);
  }

  torch::nn::Sequential h;
};
TORCH_MODULE_IMPL(tower, tower_impl);

/// @param peers 1: layers that are not shared
inline session_config session_of(uint64_t peers, const arguments& args) {
  session_config result;
  result.threads = 1;
  result.print_partition = false;
  if (peers == 1)
    return result;
  result.optimize = args.text("optimize");
  result.ddp = true;
  result.tensor_parallel_degree = peers;
  result.tensor_parallel_modules = {"h"};
  return result;
}

inline void run_layers(const arguments& args) {
  static counting_allocator counting;
  c10::SetCPUAllocator(&counting, 200);
  const task x{args};
  const auto peers = args.number("peers", 1);
  session s{session_of(static_cast<uint64_t>(peers), args)};
  auto sizes = model_of(x.sizes);
  sizes.layers = layers;
  torch::manual_seed(1);
  distributed_model model{tower{sizes}};
  int calls = 0;
  int64_t kept = 0;
  auto train_step = step([&](torch::Tensor y) {
    auto before = bytes_of_tensors.load();
    for (int i = 0; i < calls; ++i)
      y = model(y);
    auto loss = y.mean();
    y.reset();
    kept = bytes_of_tensors - before;
    model.backward(loss);
    return loss;
  });
  model.partition();
  const auto input = torch::randn(
    {samples / peers, x.sizes.length, x.sizes.width});
  figures result;
  for (int64_t i = 0; i < x.warmup + x.steps; ++i)
    for (calls = 1; calls <= 2; ++calls) {
      barrier(); // nothing is in flight any more
      train_step(input);
      auto all = allgather(static_cast<double>(kept));
      if (i < x.warmup)
        continue;
      auto add = [&](const char* name, double value) {
        result.numbers[fmt::format("{}.{}", name, calls)].push_back(value);
      };
      add("kept", *std::ranges::max_element(all));
      add("sent", static_cast<double>(s.last_step().bytes_sent));
    }
  if (s.rank() == 0)
    write(result, args.text("file"));
}

// -- the comparison -----------------------------------------------------------

/// @returns the bytes that one layer adds
inline double of_a_layer(const figures& x, const std::string& name) {
  return (median(x[name + ".2"]) - median(x[name + ".1"])) / layers;
}

/// Prints what ranks keep and send for layers of this width.
inline void count(const scratch& dir, arguments args, int64_t width) {
  args.set(fmt::format("--width={}", width));
  auto run = [&](uint64_t peers, const char* optimize) {
    args.set(fmt::format("--peers={}", peers));
    args.set(fmt::format("--optimize={}", optimize));
    return run_fresh(dir, peers, "layers", args);
  };
  const auto alone = of_a_layer(run(1, "memory"), "kept");
  const auto tokens = static_cast<double>(samples * gpt_sizes{}.length);
  const auto channels = static_cast<double>(width);
  fmt::print(
    "\n(b) a layer of width {}, {} samples of {} tokens on all ranks together; "
    "bytes of one rank, float32\n"
    "  {:<30}{:>9}{:>9}{:>9}{:>11}{:>9}{:>9}\n"
    "  {:<30}{:>9.3f}{:>9.3f}\n",
    width, samples, gpt_sizes{}.length, "MB", "keeps", "eq. 4", "one / T",
    "sends", "formula", "ratio", "one process", 1e-6 * alone,
    1e-6 * kept_bytes_of_layer(tokens, channels, 1));
  for (uint64_t peers : {2, 4})
    for (auto optimize : {"memory", "speed"}) {
      const auto found = run(peers, optimize);
      const auto ranks = static_cast<double>(peers);
      const auto sent = of_a_layer(found, "sent");
      const auto formula = bytes_of_layer(tokens / ranks, channels, ranks,
                                          optimize);
      fmt::print("  {:<30}{:>9.3f}{:>9.3f}{:>9.3f}{:>11.3f}{:>9.3f}{:>9.4f}\n",
                 fmt::format("shared by {} ranks, for {}", peers, optimize),
                 1e-6 * of_a_layer(found, "kept"),
                 1e-6 * kept_bytes_of_layer(tokens, channels, ranks),
                 1e-6 * alone / ranks, 1e-6 * sent, 1e-6 * formula,
                 sent / formula);
    }
  std::fflush(stdout);
}

} // namespace smp::bench::shared_layers
