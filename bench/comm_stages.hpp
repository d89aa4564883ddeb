#pragma once

// The cost of the communication stages, and what UCX itself can achieve.

#include "bench/fabric_pair.hpp"
#include "bench/harness.hpp"

#include "actors/comm/comm_fabric.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace smp::bench {

inline fabric_pair::wrap stages(const comm_options& x) {
  return [x](std::shared_ptr<fabric> inner) -> std::shared_ptr<fabric> {
    // A `fabric_pair` has two ranks.
    auto board = std::make_shared<rank_board>(inner->self(), 2);
    return std::make_shared<comm_fabric>(
      std::move(inner), std::make_shared<actor_host>(), std::move(board), x);
  };
}

inline comm_options forced(uint64_t ranks_per_node) {
  return {true, uint64_t{256} << 20, uint64_t{512} << 20, ranks_per_node};
}

inline constexpr const char* all_parts = "abcde";

inline constexpr std::array stage_kinds{"plain", "host", "device", "nodes"};
inline constexpr std::array<uint64_t, 4> trip_sizes{64, 8 << 10, 64 << 10,
                                                    1 << 20};

inline constexpr std::array request_kinds{
  "request.fabric", "request.stages", "request.spin", "request.spin_stages"};

/// Longer than any interval that is measured.
inline ucx_options spinning() {
  ucx_options result;
  result.spin = std::chrono::milliseconds{10};
  return result;
}

/// Size of a request and of its answer, in bytes.
inline constexpr uint64_t request_size = 64;

inline std::vector<uint64_t> stream_sizes() {
  std::vector<uint64_t> result;
  for (uint64_t x = 4 << 10; x <= 64 << 20; x *= 4)
    result.push_back(x);
  return result;
}

inline int stream_count(uint64_t size) {
  return size <= 64 << 10 ? 1000 : size <= 1 << 20 ? 300 : 24;
}

// -- what is compared with ----------------------------------------------------

/// @returns bytes per second of copies of `size` bytes on this thread
inline double copy_rate(uint64_t size) {
  std::vector<char> from(size, 'x');
  std::vector<char> to(size, 'y');
  auto count = stream_count(size);
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    std::memcpy(to.data(), from.data(), size);
    asm volatile("" : : "r"(to.data()) : "memory");
  }
  std::chrono::duration<double> spent = std::chrono::steady_clock::now()
                                        - begin;
  return static_cast<double>(size) * count / spent.count();
}

/// Runs a test of ucx_perftest between two processes of this machine, with the
/// transports of smp. @returns the columns of its result; empty without it
inline std::vector<double> perftest(const std::string& test, uint64_t size,
                                    int count) {
  auto* dir = std::getenv("SMP_UCX_DIR");
  auto program = fmt::format("{}/bin/ucx_perftest", dir ? dir : "");
  if (!std::filesystem::exists(program))
    return {};
  static int port = 23400 + static_cast<int>(::getpid() % 1000);
  ++port;
  auto command = fmt::format(
    "export LD_LIBRARY_PATH={0}/lib UCX_TLS=posix,cma,tcp,self "
    "UCX_NET_DEVICES=lo UCX_MAX_RNDV_RAILS=1 UCX_WARN_UNUSED_ENV_VARS=n; "
    "(taskset -c 1 {1} -p {2} >/dev/null 2>&1 &); sleep 0.3; "
    "taskset -c 0 timeout 60 {1} 127.0.0.1 -p {2} -t {3} -s {4} -n {5} "
    "-w {6} -f 2>/dev/null | tail -1",
    dir, program, port, test, size, count, count / 10 + 1);
  auto* pipe = ::popen(command.c_str(), "r");
  char line[512] = {};
  auto* got = pipe ? std::fgets(line, sizeof line, pipe) : nullptr;
  if (pipe)
    ::pclose(pipe);
  // iterations, microseconds of a message (median, average, overall), then MB/s
  // on average
  std::istringstream in{got ? line : ""};
  std::vector<double> result;
  for (double x = 0; in >> x;)
    result.push_back(x);
  if (result.size() < 5)
    result.clear();
  return result;
}

/// @returns its bandwidth in bytes per second for active messages of `size`
/// bytes, sent as smp does, sleeping; 0: there is no ucx_perftest
inline double perftest_rate(uint64_t size) {
  auto x = perftest("ucp_am_bw -E sleep", size, stream_count(size));
  return x.empty() ? 0 : x[4] * (1 << 20);
}

/// @returns the median time of a message of 64 bytes and its answer, in
/// seconds; 0: there is no ucx_perftest
/// @param mode "sleep" until a message arrives, or "poll"
inline double perftest_trip(const std::string& mode) {
  auto x = perftest("ucp_am_lat -E " + mode, request_size, 10000);
  return x.empty() ? 0 : 2e-6 * x[1];
}

// -- the runs -----------------------------------------------------------------

/// A request and its answer, alternating with ucx_perftest.
inline void run_requests(const arguments& args, std::span<fabric_pair, 4> pairs,
                         figures& result) {
  for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i) {
    constexpr int trips = 3000;
    auto add = [&](const char* name, const series& x) {
      auto& all = result.numbers[name];
      all.insert(all.end(), x.begin(), x.end());
    };
    for (size_t k = 0; k < pairs.size(); ++k)
      add(request_kinds[k], pairs[k].round_trips(request_size, trips, true));
    add("request.sleep", {perftest_trip("sleep")});
    add("request.poll", {perftest_trip("poll")});
  }
}

inline void run_stages(const arguments& args) {
  auto parts = args.text("part", all_parts);
  // All forks must precede the first thread.
  std::array<fabric_pair, 4> requests{
    fabric_pair{{}}, fabric_pair{{}, stages({})}, fabric_pair{spinning()},
    fabric_pair{spinning(), stages({})}};
  std::array<fabric_pair, 4> pairs{fabric_pair{{}}, fabric_pair{{}, stages({})},
                                   fabric_pair{{}, stages(forced(0))},
                                   fabric_pair{{}, stages(forced(1))}};
  stay_on(0);
  figures result;
  if (parts.find('b') != std::string::npos)
    run_requests(args, requests, result);
  if (parts.find('c') != std::string::npos)
    for (auto size : trip_sizes) {
      constexpr int trips = 1500;
      for (int i = 0; i < trips; ++i)
        for (size_t j = 0; j < pairs.size(); ++j) {
          // Rotated, as each one finds the caches as the one before left them.
          auto k = (j * (i % 2 == 0 ? 1 : 3) + static_cast<size_t>(i / 2)) % 4;
          auto spent = pairs[k].round_trips(size, 1)[0];
          if (i >= trips / 5)
            result.numbers[fmt::format("trip.{}.{}", stage_kinds[k], size)]
              .push_back(spent / 2);
        }
    }
  if (parts.find('a') != std::string::npos)
    for (auto size : stream_sizes())
      for (int64_t i = 0, n = args.number("rounds", 3); i < n; ++i) {
        for (size_t k = 0; k < pairs.size(); ++k)
          result.numbers[fmt::format("stream.{}.{}", stage_kinds[k], size)]
            .push_back(stream(pairs[k].sends(), size, stream_count(size)));
        result.numbers[fmt::format("stream.perftest.{}", size)].push_back(
          perftest_rate(size));
        result.numbers[fmt::format("stream.memcpy.{}", size)].push_back(
          copy_rate(size));
      }
  write(result, args.text("file"));
}

inline void print_requests(const figures& x) {
  fmt::print("\na request of {} B and its answer, us{:>16}{:>12}\n",
             request_size, "min", "median");
  for (auto [name, text] :
       {std::pair{"request.fabric", "fabric, sleeping"},
        {"request.stages", "stages, host path, sleeping"},
        {"request.sleep", "ucx_perftest, sleeping"},
        {"request.spin", "fabric, spinning"},
        {"request.spin_stages", "stages, host path, spinning"},
        {"request.poll", "ucx_perftest, spinning"}}) {
    if (median(x[name]) == 0)
      continue; // not measured: no ucx_perftest
    fmt::print("  {:<35}{:>12.1f}{:>12.1f}\n", text, 1e6 * minimum(x[name]),
               1e6 * median(x[name]));
  }
}

inline void print_stages(const figures& x, const std::string& parts) {
  if (parts.find('b') != std::string::npos)
    print_requests(x);
  if (parts.find('c') != std::string::npos) {
    fmt::print(
      "\none way between two ranks, us: minimum and median (what is added)\n"
      "  {:>10}{:>16}{:>22}{:>22}{:>22}\n",
      "bytes", "fabric", "stages, host path", "device, one node",
      "device, two nodes");
    for (auto size : trip_sizes) {
      auto of = [&](size_t k, auto f) {
        return 1e6 * f(x[fmt::format("trip.{}.{}", stage_kinds[k], size)]);
      };
      auto first = of(0, median);
      fmt::print("  {:>10}{:>8.1f}{:>8.1f}", size, of(0, minimum), first);
      for (size_t k = 1; k < stage_kinds.size(); ++k)
        fmt::print("{:>7.1f}{:>7.1f} ({:>+5.1f})", of(k, minimum),
                   of(k, median), of(k, median) - first);
      fmt::print("\n");
    }
  }
  if (parts.find('a') != std::string::npos) {
    fmt::print(
      "\none direction, GB/s: best of {} and median\n"
      "  {:>10}{:>14}{:>14}{:>14}{:>14}{:>14}{:>14}\n",
      x["stream.plain.4096"].size(), "KB", "fabric", "host path", "one node",
      "two nodes", "ucx_perftest", "memcpy");
    for (auto size : stream_sizes()) {
      fmt::print("  {:>10}", size >> 10);
      for (auto kind :
           {"plain", "host", "device", "nodes", "perftest", "memcpy"}) {
        auto& rates = x[fmt::format("stream.{}.{}", kind, size)];
        if (median(rates) == 0) {
          fmt::print("{:>14}", "-"); // there is no ucx_perftest
          continue;
        }
        fmt::print("{:>8.2f}{:>6.2f}", quantile(rates, 1) / 1e9,
                   median(rates) / 1e9);
      }
      fmt::print("\n");
    }
  }
  fmt::print("  load of the machine: {:.1f}\n", machine_load());
  std::fflush(stdout);
}

} // namespace smp::bench
