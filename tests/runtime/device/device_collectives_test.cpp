// ctest: seconds=30
#include "tests/support/catch.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/simulated/mistakes.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "transport/collectives/collectives.hpp"

#include <torch/torch.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

// Collectives over tensors on devices: they are added there, to the bits of the
// host, and the host waits for nothing but messages.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using tensors = std::vector<Tensor>;

virtual_world_options world_on(const std::string& device, uint64_t ranks) {
  auto result = manual_world(ranks);
  result.config.device = device;
  return result;
}

c10::Device device_here() {
  return session::current().internals().device();
}

/// What a rank gives: numbers of all sizes, and some that are none.
Tensor given(uint64_t rank, int64_t count, at::ScalarType type) {
  auto all = torch::arange(count, torch::kDouble) * 1.7
             + static_cast<double>(rank) * 40503;
  if (!at::isFloatingType(type))
    return all.remainder(251).to(type);
  all = torch::sin(all) * torch::pow(10, all.remainder(7) - 3);
  if (count > 4) {
    all[1] = rank == 1 ? std::numeric_limits<double>::infinity() : 0;
    all[2] = rank == 0 ? -0.0 : 0.0;
  }
  return all.to(type);
}

struct size_of_calls {
  uint64_t ranks;
  int64_t count;
  at::ScalarType type;
  /// Of each rank; empty: one.
  std::vector<uint64_t> machines = {};
};

/// Every kind of sum and move, some in place, many at a time.
/// @returns what each rank got of each, in the order of ranks
tensors run_all(const std::string& device, const size_of_calls& what) {
  auto ranks = what.ranks;
  std::vector<tensors> result(ranks);
  run_virtual_world(ranks, world_on(device, ranks), [&](session& s) {
    if (!what.machines.empty())
      s.internals().collectives().place(what.machines);
    const auto& world = comm_group::world;
    auto x = given(s.rank(), what.count, what.type).to(device_here());
    auto parts = torch::stack(tensors(ranks, x));
    std::vector<reduce_op> ops{reduce_op::sum, reduce_op::max};
    if (at::isFloatingType(what.type))
      ops.push_back(reduce_op::mean);
    std::vector<tensor_future> running;
    for (auto op : ops) {
      running.push_back(async::allreduce(x, world, op));
      running.push_back(async::allreduce_(x.clone(), world, op));
      running.push_back(async::reduce(x, world, ranks - 1, op));
      running.push_back(async::reduce_scatter(parts, world, op));
    }
    running.push_back(async::broadcast(x, world, 1));
    running.push_back(async::broadcast_(x.clone(), world, 0));
    running.push_back(async::allgather(x));
    running.push_back(async::all_to_all(parts));
    running.push_back(async::gather(x));
    running.push_back(async::scatter(parts));
    for (auto& one : running)
      if (auto y = one.get(); y.defined()) {
        if (y.device() != x.device())
          throw std::runtime_error{"a result on another device"};
        // Read by a kernel, which nothing but `get` orders after the sum.
        result[s.rank()].push_back(y.clone().cpu());
      }
  });
  tensors all;
  for (auto& of_rank : result)
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  return all;
}

std::string different(const tensors& x, const tensors& y) {
  if (x.size() != y.size())
    return "their number";
  for (size_t i = 0; i < x.size(); ++i)
    if (!torch::equal(x[i].contiguous().view(-1).view(torch::kByte),
                      y[i].contiguous().view(-1).view(torch::kByte)))
      return "result " + std::to_string(i);
  return {};
}

} // namespace

TEST_CASE("sums on devices have the bits of those on the host",
          "[runtime][device][tensor_collectives][R30]") {
  // Of one message, of parts in several segments, along a tree, and between
  // machines.
  auto x = GENERATE(
    size_of_calls{2, 5, torch::kFloat}, size_of_calls{3, 1000, torch::kHalf},
    size_of_calls{3, 1000, torch::kBFloat16},
    size_of_calls{2, 70'001, torch::kDouble},
    size_of_calls{3, 0, torch::kFloat},
    size_of_calls{3, 800'003, torch::kFloat},
    size_of_calls{3, 200'000, torch::kHalf},
    size_of_calls{4, 100'000, torch::kBFloat16, {0, 0, 1, 1}},
    size_of_calls{4, 100'000, torch::kFloat, {0, 0, 0, 1}},
    size_of_calls{2, 100'000, torch::kInt}, size_of_calls{3, 100, torch::kChar},
    size_of_calls{9, 100, torch::kFloat}, size_of_calls{9, 100, torch::kHalf});
  auto peers = GENERATE(true, false);
  INFO(x.ranks << " ranks, " << x.count << " of " << c10::toString(x.type)
               << (peers ? ", peers" : ""));
  auto on_host = run_all("cpu", x);
  checked_devices devices{200};
  sim::config().no_peers = !peers;
  CHECK(different(run_all("sim", x), on_host) == "");
  CHECK(devices.race() == "");
}

TEST_CASE("a sum that begins before its numbers are there shows",
          "[runtime][device][tensor_collectives]") {
  checked_devices devices{200};
  sim::seed_mistake("early-sum");
  run_all("sim", {2, 1000, torch::kFloat});
  sim::seed_mistake(nullptr);
  CHECK(devices.race() != "");
}

TEST_CASE("a collective on devices makes no host wait for one",
          "[runtime][device][tensor_collectives]") {
  sim::host_wait_counts waits;
  run_virtual_world(2, world_on("sim", 2), [&](session& s) {
    auto large = torch::ones({300'000}).to(device_here());
    auto small = torch::ones({3}).to(device_here());
    for (int i = 0; i < 2; ++i) {
      barrier();
      sim::reset_host_waits();
      barrier();
      auto sum = async::allreduce_(large);
      allreduce(small + small);
      sum.get();
      allgather(small);
      barrier();
    }
    if (s.rank() == 0)
      waits = sim::host_waits();
  });
  CAPTURE(waits.by_name);
  CHECK(waits.number == 0);
}

TEST_CASE("tensors here on the host and there on a device are refused",
          "[runtime][device][tensor_collectives][R43]") {
  std::string text;
  run_virtual_world(2, world_on("sim", 2), [&](session& s) {
    auto x = torch::ones({3});
    auto why = error_of(
      [&] { allreduce(s.rank() == 0 ? x : x.to(device_here())); },
      error_code::protocol);
    if (s.rank() == 0)
      text = why;
    // Of the host alone they stay there.
    if (!torch::equal(allreduce(x), 2 * x))
      throw std::runtime_error{"wrong on the host"};
  });
  CHECK_THAT(text, ContainsSubstring("sum allreduce of float32[3] on devices"));
}

TEST_CASE("a device that fails ends the collective on all ranks, by name",
          "[runtime][device][tensor_collectives]") {
  auto count = GENERATE(int64_t{300'000}, int64_t{3});
  auto peers = GENERATE(true, false);
  CAPTURE(count, peers);
  checked_devices devices;
  sim::config().no_peers = !peers;
  std::vector<std::string> texts(2);
  run_virtual_world(2, world_on("sim", 2), [&](session& s) {
    auto x = torch::ones({count}).to(device_here());
    allreduce(x);
    std::optional<held_stream> hold;
    if (s.rank() == 1) {
      c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};
      hold.emplace(guard.getStream(device_here()));
      sim::launch(1, sim::current_stream(1), "broken kernel",
                  [] { sim::fail_device(1); });
    }
    auto sum = async::allreduce(x, comm_group::world, reduce_op::sum, "lost");
    hold.reset();
    try {
      sum.get();
    } catch (const error& e) {
      assertion_lock asserting;
      texts[s.rank()] = e.what();
    }
  });
  for (auto& text : texts)
    CHECK_THAT(text, ContainsSubstring("allreduce \"lost\" of ranks 0, 1")
                       && ContainsSubstring("rank 1")
                       && ContainsSubstring("failed"));
}
