// How fast tensors are summed and dealt out between ranks:
//
//   bench_comm [--rounds=N] [--largest=BYTES]
//
// allreduce and all_to_all of 1 KB to 64 MB among 2 and 4 ranks, one call after
// the other, beside torch.distributed with gloo where SMP_PYTHON is a Python
// that has it. A round begins fresh processes of both, by turns. Times are
// those of rank 0 from call to result.

#include "bench/harness.hpp"

#include "smp/smp.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

/// Of one call on one rank, in bytes.
std::vector<int64_t> sizes(const arguments& args) {
  std::vector<int64_t> result;
  for (int64_t x = 1 << 10; x <= args.number("largest", 64 << 20); x *= 4)
    result.push_back(x);
  return result;
}

/// So that each size takes about as long.
int64_t calls_of(int64_t size) {
  return size <= 64 << 10 ? 400 : size <= 4 << 20 ? 60 : 12;
}

std::string name_of(const char* kind, int64_t size) {
  return fmt::format("{}.{}", kind, size);
}

void run_collectives(const arguments& args) {
  session_config setup;
  setup.pipeline_parallel_degree = static_cast<uint64_t>(args.number("p", 2));
  setup.threads = 1;
  session s{setup};
  auto world = static_cast<int64_t>(s.size());
  record result;
  auto measure = [&](const std::string& name, int64_t calls, auto call) {
    for (int64_t i = 0; i < calls + calls / 10 + 2; ++i) {
      barrier();
      auto begin = clock::now();
      call();
      std::chrono::duration<double> spent = clock::now() - begin;
      if (i >= calls / 10 + 2)
        result.numbers[name].push_back(spent.count());
    }
  };
  for (auto size : sizes(args)) {
    auto x = torch::zeros({size / 4});
    measure(name_of("allreduce", size), calls_of(size), [&] { allreduce_(x); });
    auto y = torch::ones({world, size / 4 / world});
    measure(name_of("all_to_all", size), calls_of(size), [&] {
      if (all_to_all(y).numel() != y.numel())
        throw std::runtime_error{"all_to_all came out wrong"};
    });
  }
  if (s.rank() == 0)
    write(result, args.text("file"));
}

// -- its peer -----------------------------------------------------------------

/// @returns a Python with torch, or nothing
std::string python() {
  auto* x = std::getenv("SMP_PYTHON");
  return x ? x : "";
}

record run_peer(const scratch& dir, uint64_t ranks, arguments args) {
  auto here = std::filesystem::path{__FILE__}.parent_path();
  args.set("--rendezvous=" + std::string{dir / "rendezvous"});
  std::string list;
  for (auto size : sizes(args))
    list += fmt::format("{}{}:{}", list.empty() ? "" : ",", size,
                        calls_of(size));
  args.set("--sizes=" + list);
  std::filesystem::remove(dir / "rendezvous");
  return run_program(dir, ranks, {python(), here / "torch_collectives.py"},
                     args);
}

void compare(const scratch& dir, arguments args, uint64_t ranks) {
  args.set(fmt::format("--p={}", ranks));
  record mine;
  record peer;
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i) {
    mine.add(run_fresh(dir, ranks, "collectives", args));
    if (!python().empty())
      peer.add(run_peer(dir, ranks, args));
  }
  for (auto kind : {"allreduce", "all_to_all"}) {
    fmt::print("\n{} among {} ranks\n  {:>8}{:>12}{:>12}{:>12}{:>12}{:>16}\n",
               kind, ranks, "KB", "smp, us min", "median", "gloo, us min",
               "median", "smp : gloo");
    for (auto size : sizes(args)) {
      auto name = name_of(kind, size);
      fmt::print("  {:>8}{:>12.1f}{:>12.1f}", size >> 10,
                 1e6 * minimum(mine[name]), 1e6 * median(mine[name]));
      if (!python().empty())
        fmt::print("{:>12.1f}{:>12.1f}{:>8.2f}{:>8.2f}",
                   1e6 * minimum(peer[name]), 1e6 * median(peer[name]),
                   minimum(mine[name]) / minimum(peer[name]),
                   median(mine[name]) / median(peer[name]));
      fmt::print("\n");
    }
  }
  fmt::print("  load of the machine: {:.1f}\n", machine_load());
  std::fflush(stdout);
}

// -- main ---------------------------------------------------------------------

void run(const arguments& args) {
  if (args.text("run") == "collectives")
    return run_collectives(args);
  scratch dir;
  if (python().empty())
    fmt::print(
      "no Python with torch: './dev zoo' makes one, or set "
      "SMP_PYTHON; so without torch.distributed\n");
  for (uint64_t ranks : {2, 4})
    compare(dir, args, ranks);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
