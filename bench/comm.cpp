// How fast messages cross between ranks, and tensors are summed and dealt out:
//
//   bench_comm [--rounds=N] [--largest=BYTES] [--part=abcde] [--ranks=2,4]
//              [--idle=SECONDS]
//
// (a) Bandwidth of one direction, compared with ucx_perftest of the same UCX if
// SMP_UCX_DIR has it, and with memcpy. (b) A request of 64 B and its answer,
// for which a thread waits where messages arrive, both sides sleeping between
// messages, as smp does, or spinning (transport.spin), which takes a core for
// each rank, compared with ucx_perftest in the same mode. (c) What the
// communication stages add to a message. All of these alternate in one process
// and its peers. (d) allreduce and all_to_all of 1 KB to 64 MB among so many
// ranks, one call after the other, compared with torch.distributed with gloo if
// SMP_PYTHON is a Python that has it. A round starts fresh processes of both,
// in turn. Times are those of rank 0 from call to result. (e) CPU time of ranks
// that are connected and idle.

#include "bench/comm_stages.hpp"
#include "bench/harness.hpp"

#include "smp/smp.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

/// Sizes of a call on one rank, in bytes.
std::vector<int64_t> sizes(const arguments& args) {
  std::vector<int64_t> result;
  for (int64_t x = 1 << 10; x <= args.number("largest", 64 << 20); x *= 4)
    result.push_back(x);
  return result;
}

/// Calls per size, so that each size takes about as long.
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
  figures result;
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

/// CPU time of each rank while its user's thread sleeps, in percent of a
/// core.
void run_idle(const arguments& args) {
  session_config setup;
  setup.pipeline_parallel_degree = static_cast<uint64_t>(args.number("p", 2));
  setup.threads = 1;
  session s{setup};
  // Let work left from the start end first.
  barrier();
  std::this_thread::sleep_for(std::chrono::seconds{1});
  auto begin = clock::now();
  auto cpu = std::clock();
  std::this_thread::sleep_for(std::chrono::seconds{args.number("idle", 10)});
  std::chrono::duration<double> spent = clock::now() - begin;
  auto used = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  auto all = allgather(100 * used / spent.count());
  if (s.rank() == 0) {
    figures result;
    result.numbers["idle"] = all;
    write(result, args.text("file"));
  }
}

void print_idle(const scratch& dir, arguments args, uint64_t ranks) {
  args.set(fmt::format("--p={}", ranks));
  auto x = run_fresh(dir, ranks, "idle", args);
  fmt::print("\nidle for {} s, {} ranks, % of a core:", args.number("idle", 10),
             ranks);
  for (auto y : x["idle"])
    fmt::print(" {:.2f}", y);
  fmt::print("\n  load of the machine: {:.1f}\n", machine_load());
  std::fflush(stdout);
}

// -- its peer -----------------------------------------------------------------

/// @returns a Python with torch, or nothing
std::string python() {
  auto* x = std::getenv("SMP_PYTHON");
  return x ? x : "";
}

figures run_peer(const scratch& dir, uint64_t ranks, arguments args) {
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
  figures mine;
  figures peer;
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
  if (args.text("run") == "stages")
    return run_stages(args);
  if (args.text("run") == "idle")
    return run_idle(args);
  scratch dir;
  auto parts = args.text("part", all_parts);
  auto has = [&](const char* any) {
    return parts.find_first_of(any) != std::string::npos;
  };
  if (has("abc"))
    print_stages(run_fresh(dir, 1, "stages", args), parts);
  if (has("d") && python().empty())
    fmt::print(
      "no Python with torch: './dev zoo' makes one, or set "
      "SMP_PYTHON; so without torch.distributed\n");
  std::istringstream list{args.text("ranks", "2,4")};
  for (std::string ranks; std::getline(list, ranks, ',');) {
    if (has("d"))
      compare(dir, args, std::stoull(ranks));
    if (has("e"))
      print_idle(dir, args, std::stoull(ranks));
  }
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
