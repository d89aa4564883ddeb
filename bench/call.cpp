// What a call of a module on another rank costs:
//
//   bench_call [--calls=N] [--kilobytes=N]
//
// Inside a step on pp_rank 0, one call after the other, each waiting for its
// results, both ranks otherwise idle; request and response carry a tensor of
// 64 KB each. Beside it the bare fabric with the same bytes, and the same
// module on the own rank.

#include "bench/fabric_pair.hpp"
#include "bench/harness.hpp"

#include "smp/smp.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <optional>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

int64_t calls_of(const arguments& x) {
  return x.number("calls", 2000);
}

int64_t bytes_of(const arguments& x) {
  return x.number("kilobytes", 64) * 1024;
}

struct plus_one_impl : torch::nn::Module {
  plus_one_impl() {
    one = register_parameter("one", torch::ones(1));
  }

  /// x: any shape @returns the same shape
  torch::Tensor forward(torch::Tensor x) {
    return x + one;
  }

  torch::Tensor one;
};
TORCH_MODULE_IMPL(plus_one, plus_one_impl);

template <class M>
M on_rank(uint32_t pp_rank) {
  partition_scope place{pp_rank};
  return M{};
}

struct pair_impl : torch::nn::Module {
  pair_impl() {
    register_module("near", near);
    register_module("far", far);
  }

  submodule<plus_one> near = on_rank<submodule<plus_one>>(0);
  submodule<plus_one> far = on_rank<submodule<plus_one>>(1);
};
TORCH_MODULE_IMPL(pair, pair_impl);

void run_calls(const arguments& args) {
  session_config setup;
  setup.fast_mode = false;
  setup.pipeline_parallel_degree = 2;
  setup.auto_partition = false;
  setup.threads = 1;
  session s{setup};
  distributed_model model{pair{}};
  figures result;
  auto measure = [&](const char* name, auto& module, bool grad, int64_t n) {
    // Few calls per step: with gradients their owner keeps what backward needs
    // until the step ends.
    constexpr int64_t per_step = 100;
    auto body = step([&](torch::Tensor x) {
      at::AutoGradMode mode{grad};
      for (int64_t i = 0; i < per_step; ++i) {
        auto begin = clock::now();
        auto y = module(x);
        std::chrono::duration<double> spent = clock::now() - begin;
        result.numbers[name].push_back(spent.count());
        if (i == 0 && !y.equal(x + 1))
          throw std::runtime_error{"x + 1 came out wrong"};
      }
    });
    auto x = torch::randn({bytes_of(args) / 4});
    body(x); // warm
    body(x);
    result.numbers[name].clear();
    for (int64_t i = 0; i < n; i += per_step)
      body(x);
  };
  measure("far", model->far, false, calls_of(args));
  measure("far.grad", model->far, true, calls_of(args));
  measure("near", model->near, false, calls_of(args));
  if (s.rank() == 0)
    write(result, args.text("file"));
}

void run_fabric(const arguments& args) {
  fabric_pair pair{{}};
  figures result;
  result.numbers["fabric"] = pair.round_trips(
    static_cast<uint64_t>(bytes_of(args)), static_cast<int>(calls_of(args)));
  result.text = pair.ucx().transports_to(rank_id{1});
  write(result, args.text("file"));
}

void print(const char* text, const series& x) {
  auto us = [&](double q) { return quantile(x, q) * 1e6; };
  fmt::print("  {:<42} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f}\n", text, us(0),
             us(0.5), us(0.9), us(0.99));
}

void run(const arguments& args) {
  auto what = args.text("run");
  if (what == "calls")
    return run_calls(args);
  if (what == "fabric")
    return run_fabric(args);
  scratch dir;
  auto before = machine_load();
  auto x = run_fresh(dir, 1, "fabric", args);
  auto transports = x.text;
  x.add(run_fresh(dir, 2, "calls", args));
  fmt::print(
    "A tensor of {} KB there and one back, {} times ({})\n"
    "  {:<42} {:>8} {:>8} {:>8} {:>8}\n",
    bytes_of(args) / 1024, calls_of(args), transports, "us", "min", "median",
    "p90", "p99");
  print("remote, no_grad (aim: min 110, median 150)", x["far"]);
  print("remote with grad, forward only", x["far.grad"]);
  print("bare fabric", x["fabric"]);
  print("local", x["near"]);
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
