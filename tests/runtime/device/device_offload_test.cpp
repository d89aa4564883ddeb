// ctest: seconds=10
#include "tests/support/catch.hpp"

#include "runtime/device/storage_copies.hpp"
#include "runtime/offload/offload_store.hpp"
#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/simulated/mistakes.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// Activations of a device in a file (R57): device memory, pinned memory, file,
// and back.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;
using torch::nn::Linear;

namespace {

constexpr int64_t side = 64, rows = 512, layers = 12;

/// Twelve layers with dropout, of which the second half is on the last rank, so
/// that arguments are kept that arrived in messages.
struct tower_impl : torch::nn::Module {
  explicit tower_impl(uint64_t ranks) {
    for (int64_t i = 0; i < layers; ++i) {
      partition_scope scope{
        static_cast<uint32_t>(i < layers / 2 ? 0 : ranks - 1)};
      body->push_back(Linear{side, side});
      body->push_back(torch::nn::Dropout{0.1});
    }
    register_module("body", body);
  }

  Tensor forward(Tensor x) {
    return body->forward(x).square().mean();
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(tower, tower_impl);

struct outcome {
  std::vector<double> losses;
  std::vector<Tensor> gradients;
  uint64_t offloaded = 0;
  size_t peak = 0; // bytes of device memory that a step takes
  sim::host_wait_counts waits;
  std::string race;
};

struct job {
  uint64_t ranks = 1;
  bool offload = true;
  std::string pipeline = "simple";
  uint64_t microbatches = 2;
};

virtual_world_options world_of(const job& x) {
  auto world = manual_world(x.ranks, x.microbatches);
  world.reorder = false;
  world.config.device = "sim";
  world.config.pipeline = x.pipeline;
  world.config.activation_checkpointing.modules = {"body"};
  world.config.offload_activations = x.offload;
  if (x.offload)
    world.config.activation_loading_horizon = 2;
  return world;
}

void train(session& s, outcome& out) {
  distributed_model model{seeded([&] { return tower{s.size()}; })};
  auto train_step = training_step(model);
  for (int i = 0; i < 3; ++i) {
    for (auto& p : model.local_parameters())
      p.mutable_grad() = Tensor{};
    auto x = torch::sin(torch::arange(rows * side * 1.0) * (i + 1))
               .view({rows, side})
               .to(torch::kFloat);
    barrier();
    if (s.rank() == 0) {
      sim::reset_host_waits();
      sim::reset_peak(0);
    }
    auto before = sim::memory(0).allocated;
    barrier();
    auto loss = train_step(x);
    if (s.rank() != 0)
      continue;
    out.waits = sim::host_waits();
    out.peak = sim::memory(0).peak - before;
    out.offloaded = s.last_step().offloaded_bytes;
    out.losses.push_back(loss.reduce_mean().item<double>());
  }
  if (s.rank() == 0)
    for (auto& p : model.local_parameters())
      out.gradients.push_back(p.grad().cpu());
}

outcome run(const job& x) {
  outcome result;
  checked_devices devices{100};
  run_virtual_world(x.ranks, world_of(x),
                    [&](session& s) { train(s, result); });
  result.race = devices.race();
  return result;
}

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::ranges::equal(
    a, b, [](auto& x, auto& y) { return at::allclose(x, y, 1e-4, 1e-6); });
}

// -- the store ----------------------------------------------------------------

constexpr int64_t large = 1 << 20; // bytes

struct device_store {
  device_store() {
    rank->enter_thread();
    offload_store::options options;
    options.dir = dir.path;
    options.horizon = 2;
    options.device = rank->make_storage_copies();
    store = offload_store::make(open_offload_file(dir.path), options);
  }

  ~device_store() {
    store->stop();
    store = nullptr;
    rank->leave_thread();
  }

  c10::Stream stream() const {
    return c10::impl::VirtualGuardImpl{c10::kPrivateUse1}.getStream(
      sim_device());
  }

  std::unique_ptr<offload_store::set> give(int number) {
    auto x = at::full({large}, number,
                      at::TensorOptions{at::kByte}.device(sim_device()));
    return store->give(0, {{x.storage(), 0, large, 0}});
  }

  scratch_dir dir;
  std::shared_ptr<rank_device> rank = choose_device("sim", 0);
  std::shared_ptr<offload_store> store;
};

Tensor tensor_over(const offload_store::part& x) {
  auto result = at::empty({0},
                          at::TensorOptions{at::kByte}.device(sim_device()));
  return result.set_(x.memory, static_cast<int64_t>(x.offset),
                     {static_cast<int64_t>(x.bytes)}, {1});
}

} // namespace

TEST_CASE("on devices activations in a file change no number",
          "[runtime][device][R57]") {
  for (auto* pipeline : {"simple", "interleaved", "1f1b"})
    for (uint64_t ranks : {1, 2}) {
      INFO(pipeline << " on " << ranks << " ranks");
      auto kept = run({ranks, false, pipeline, 4});
      auto moved = run({ranks, true, pipeline, 4});
      CHECK(kept.offloaded == 0);
      CHECK(moved.offloaded > 0);
      CHECK(moved.race == "");
      CHECK(kept.losses == moved.losses);
      CHECK(same(kept.gradients, moved.gradients));
      if (ranks == 1)
        CHECK(std::ranges::equal(kept.gradients, moved.gradients, at::equal));
    }
}

TEST_CASE("activations in a file leave the device, and nobody waits for it",
          "[runtime][device][R57]") {
  auto kept = run({1, false}), moved = run({1, true});
  // Of two microbatches' 24 arguments of 64 KB.
  CAPTURE(kept.peak, moved.peak);
  CHECK(kept.peak > size_t{24} * 64 * 1024);
  CHECK(moved.peak < kept.peak / 2);
  CAPTURE(moved.waits.by_name, moved.waits.last);
  CHECK(moved.waits.number == 0);
}

TEST_CASE("mistakes with activations in a file are seen",
          "[runtime][device][R57]") {
  static const auto right = run({1, true});
  REQUIRE(right.race == "");
  auto* name = GENERATE("early-eviction", "early-return", "unawaited-return");
  sim::seed_mistake(name);
  auto wrong = run({1, true});
  sim::seed_mistake(nullptr);
  INFO(name);
  CHECK((wrong.race != "" || wrong.losses != right.losses
         || !same(wrong.gradients, right.gradients)));
}

TEST_CASE("what comes back takes no more of a device that is far behind",
          "[runtime][device][R57]") {
  checked_devices devices{100};
  device_store x;
  std::deque<std::unique_ptr<offload_store::set>> sets;
  for (int i = 0; i < 8; ++i)
    sets.push_back(x.give(i));
  sim::wait_device(0);
  auto sums = at::zeros({8},
                        at::TensorOptions{at::kDouble}.device(sim_device()));
  auto before = sim::memory(0).allocated;
  sim::reset_peak(0);
  held_stream hold{x.stream()};
  x.store->announce(0);
  for (int i = 7; i >= 0; --i) {
    auto parts = sets.back()->take();
    sets.pop_back();
    REQUIRE(parts.size() == 1);
    sums[i].copy_(tensor_over(parts[0]).amax());
  }
  CHECK(sim::memory(0).peak - before <= 4 * size_t{large});
  hold.release();
  auto expected = at::arange(8.0, at::kDouble);
  CHECK(at::equal(sums.cpu(), expected));
  CHECK(devices.race() == "");
}

TEST_CASE("what is given up on its way disturbs nothing",
          "[runtime][device][R57]") {
  checked_devices devices{100};
  {
    device_store x;
    auto a = x.give(1), b = x.give(2), c = x.give(3);
    held_stream hold{x.stream()};
    auto parts = c->take(); // and b is on its way
    b.reset();
    auto d = x.give(4); // leaves where the others were
    hold.release();
    CHECK(tensor_over(parts.at(0)).cpu().min().item<int>() == 3);
    CHECK(tensor_over(d->take().at(0)).cpu().max().item<int>() == 4);
    CHECK(tensor_over(a->take().at(0)).cpu().max().item<int>() == 1);
    auto e = x.give(5); // never taken
  }
  sim::wait_device(0);
  CHECK(devices.race() == "");
}

TEST_CASE("a device that fails ends the wait for its file",
          "[runtime][device][R57]") {
  checked_devices devices{0};
  device_store x;
  held_stream hold{x.stream()};
  sim::launch(0, x.stream().id(), "broken kernel", [] { sim::fail_device(0); });
  auto a = x.give(1), b = x.give(2);
  auto t = at::zeros({large},
                     at::TensorOptions{at::kByte}.device(sim_device()));
  std::jthread later{[&] { hold.release(); }};
  CHECK_THROWS_WITH(x.store->give(0, {{t.storage(), 0, large, 0}}),
                    ContainsSubstring("a kernel has failed"));
}
