// The cost of a call of a module on another rank:
//
//   bench_call [--part=abcd] [--calls=N] [--kilobytes=N] [--device=cuda]
//
// (a) Inside a step on pp_rank 0, one call after the other, each waiting for
// its results, both ranks otherwise idle; request and response carry a tensor
// of 64 KB each. For comparison the bare fabric with the same bytes, and the
// same module on the own rank.
//
// (b) The bytes that all ranks send in a step besides tensors, with calls that
// wait and calls that go on, for a model whose first result is used again at
// the end. Tensors are the bytes that double with the samples.
//
// (c) The cost of giving a call random numbers of its own, in one process: a
// stream is seeded and swapped in, and the previous one is swapped back.
//
// (d) On a device, the time until the host is told that a kernel is done.

#include "bench/fabric_pair.hpp"
#include "bench/harness.hpp"

#include "runtime/device/rank_device.hpp"
#include "runtime/execution/call_streams.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "smp/smp.hpp"

#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <future>
#include <numeric>
#include <optional>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

// -- (a) one call -------------------------------------------------------------

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
  setup.device = device_name(args);
  session s{setup};
  distributed_model model{pair{}};
  figures result;
  auto measure = [&](const char* name, auto& module, bool grad, int64_t n) {
    // Few calls per step: with gradients, the owner keeps what backward needs
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
    body(x); // warm-up
    body(x);
    result.numbers[name].clear();
    for (int64_t i = 0; i < n; i += per_step)
      body(x);
  };
  measure("far", model->far, false, calls_of(args));
  measure("far.grad", model->far, true, calls_of(args));
  measure("near", model->near, false, calls_of(args));
  auto sent = s.internals().communication().sent;
  result.numbers["sent"] = {std::accumulate(sent.begin(), sent.end(), 0.0)};
  result.numbers["lent"] = {
    double(sent[static_cast<size_t>(comm_rule::device_path)])};
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

void print(const char* text, const series& x, int digits = 1) {
  auto us = [&](double q) { return quantile(x, q) * 1e6; };
  fmt::print("  {:<42} {:>8.{}f} {:>8.{}f} {:>8.{}f} {:>8.{}f}\n", text, us(0),
             digits, us(0.5), digits, us(0.9), digits, us(0.99), digits);
}

void print_calls(const scratch& dir, const arguments& args) {
  auto before = machine_load();
  auto x = run_fresh(dir, 1, "fabric", args);
  auto transports = x.text;
  x.add(run_fresh(dir, 2, "calls", args));
  fmt::print(
    "(a) a tensor of {} KB there and one back, {} times ({})\n"
    "  {:<42} {:>8} {:>8} {:>8} {:>8}\n",
    bytes_of(args) / 1024, calls_of(args), transports, "us", "min", "median",
    "p90", "p99");
  print("remote, no_grad (aim: min 110, median 150)", x["far"]);
  print("remote with grad, forward only", x["far.grad"]);
  print("bare fabric", x["fabric"]);
  print("local", x["near"]);
  if (device_name(args) != "cpu")
    fmt::print("  from device to device: {:.0f} of {:.0f} tensors\n",
               x["lent"].front(), x["sent"].front());
  fmt::print("  load of the machine: {:.1f} before, {:.1f} after\n", before,
             machine_load());
}

// -- (b) envelopes ------------------------------------------------------------

constexpr uint64_t skip_ranks = 3;
constexpr int64_t skip_width = 64;
constexpr int64_t skip_microbatches = 4;

/// Layers alternate between two ranks other than their caller's.
struct long_skip_impl : torch::nn::Module {
  long_skip_impl() : scale(register_parameter("scale", torch::ones({1}))) {
    for (uint32_t i = 0; i < 6; ++i) {
      partition_scope on{1 + i % 2};
      layers.emplace_back(skip_width, skip_width);
      register_module(fmt::format("layer{}", i), layers.back());
    }
  }

  /// x: [B, 64] @returns [B, 64]
  torch::Tensor forward(torch::Tensor x) {
    auto first = layers.front()(x * scale);
    auto y = first;
    for (size_t i = 1; i + 1 < layers.size(); ++i)
      y = layers[i](y);
    return layers.back()(torch::tanh(y) + first);
  }

  torch::Tensor scale;
  std::vector<submodule<torch::nn::Linear>> layers;
};
TORCH_MODULE_IMPL(long_skip, long_skip_impl);

void run_long_skip(const arguments& args) {
  session_config setup;
  setup.pipeline_parallel_degree = skip_ranks;
  setup.microbatches = skip_microbatches;
  setup.auto_partition = false;
  setup.threads = 1;
  setup.print_partition = false;
  if (args.number("fast", 1) == 0)
    setup.fast_mode = false;
  session s{setup};
  torch::manual_seed(1);
  distributed_model model{long_skip{}};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = model(x).mean();
    model.backward(loss);
    return loss;
  });
  const auto rows = skip_microbatches * args.number("rows", 8);
  const auto input = torch::randn({rows, skip_width});
  auto of_all = [](uint64_t x) {
    auto xs = allgather(static_cast<double>(x));
    return std::accumulate(xs.begin(), xs.end(), 0.0);
  };
  figures result;
  constexpr int warmup = 4;
  for (int i = 0; i < warmup + 10; ++i) {
    train_step(input);
    const auto stats = s.last_step();
    const auto bytes = of_all(stats.bytes_sent);
    const auto requests = of_all(stats.requests);
    if (i < warmup)
      continue;
    result.numbers["bytes"].push_back(bytes);
    result.numbers["requests"].push_back(requests);
  }
  if (s.rank() == 0)
    write(result, args.text("file"));
}

void print_envelopes(const scratch& dir, const arguments& args) {
  struct mode {
    const char* text;
    const char* argument;
  };
  constexpr std::array modes{mode{"calls that wait", "--fast=0"},
                             mode{"as by default", "--fast=1"}};
  fmt::print(
    "\n(b) {} microbatches through six layers on two ranks, called by a third "
    "one; median bytes of a step\n"
    "  {:<42} {:>8} {:>8} {:>9} {:>11}\n",
    skip_microbatches, "", "requests", "tensors", "envelopes", "per request");
  for (auto& x : modes) {
    auto of = [&](int64_t rows) {
      auto mine = args;
      mine.set(x.argument);
      mine.set(fmt::format("--rows={}", rows));
      return run_fresh(dir, skip_ranks, "long_skip", mine);
    };
    const auto once = of(8), twice = of(16);
    const auto tensors = median(twice["bytes"]) - median(once["bytes"]);
    const auto envelopes = median(once["bytes"]) - tensors;
    const auto requests = median(once["requests"]);
    fmt::print("  {:<42} {:>8.0f} {:>8.0f} {:>9.0f} {:>11.1f}\n", x.text,
               requests, tensors, envelopes, envelopes / requests);
  }
}

// -- (c) random streams -------------------------------------------------------

void run_streams(const arguments& args) {
  constexpr int calls = 1000; // of a microbatch
  at::set_num_threads(1);
  const auto module = path_of_module("dropout");
  auto number = torch::empty({1});
  call_streams streams;
  figures result;
  auto measure = [&](const char* name, auto call) {
    for (int64_t i = 0; i < calls_of(args) / 10; ++i) {
      streams.begin(static_cast<uint64_t>(i));
      streams.enter_body();
      auto begin = clock::now();
      for (int k = 0; k < calls; ++k)
        call();
      std::chrono::duration<double> spent = clock::now() - begin;
      streams.end();
      result.numbers[name].push_back(spent.count() / calls);
    }
  };
  auto with_a_stream = [&](auto f) {
    streams.enter(module);
    f();
    streams.leave();
  };
  auto draw = [&] { number.uniform_(); };
  measure("swap", [&] { with_a_stream([] {}); });
  measure("draw", draw);
  measure("both", [&] { with_a_stream(draw); });
  write(result, args.text("file"));
}

void print_streams(const scratch& dir, const arguments& args) {
  auto x = run_fresh(dir, 1, "streams", args);
  fmt::print(
    "\n(c) random numbers of a call\n  {:<42} {:>8} {:>8} {:>8} {:>8}\n", "us",
    "min", "median", "p90", "p99");
  print("a stream of its own, of which nothing is drawn", x["swap"], 3);
  print("a number, from the stream that is there", x["draw"], 3);
  print("a number, from a stream of its own", x["both"], 3);
}

// -- (d) completions ----------------------------------------------------------

void run_completions(const arguments& args) {
  auto device = choose_device(device_name(args), 0);
  device->enter_thread();
  auto x = torch::ones({1}, at::TensorOptions{}.device(device->get()));
  figures result;
  for (int64_t i = 0; i < calls_of(args); ++i) {
    std::promise<void> told;
    auto begin = clock::now();
    x.add_(1);
    device->point()->then([&] { told.set_value(); });
    if (told.get_future().wait_for(std::chrono::seconds{30})
        != std::future_status::ready)
      throw std::runtime_error{"the device did not tell for 30 s"};
    std::chrono::duration<double> spent = clock::now() - begin;
    result.numbers["told"].push_back(spent.count());
  }
  write(result, args.text("file"));
}

void print_completions(const scratch& dir, const arguments& args) {
  auto x = run_fresh(dir, 1, "completions", args);
  fmt::print(
    "\n(d) completions of a device\n  {:<42} {:>8} {:>8} {:>8} {:>8}\n", "us",
    "min", "median", "p90", "p99");
  print("a kernel of one number, until it is told", x["told"]);
}

// -- main ---------------------------------------------------------------------

void run(const arguments& args) {
  auto what = args.text("run");
  if (what == "calls")
    return run_calls(args);
  if (what == "fabric")
    return run_fabric(args);
  if (what == "long_skip")
    return run_long_skip(args);
  if (what == "streams")
    return run_streams(args);
  if (what == "completions")
    return run_completions(args);
  scratch dir;
  auto part = args.text("part", "abcd");
  if (part.find('a') != part.npos)
    print_calls(dir, args);
  if (part.find('b') != part.npos)
    print_envelopes(dir, args);
  if (part.find('c') != part.npos)
    print_streams(dir, args);
  if (part.find('d') != part.npos && device_name(args) != "cpu")
    print_completions(dir, args);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
