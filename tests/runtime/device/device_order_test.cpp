// ctest: seconds=20
#include "tests/support/catch.hpp"

#include "runtime/device/rank_device.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/stalls.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/simulated/mistakes.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

// Each mistake that code for devices makes easily is made here on purpose, and
// has to show: otherwise the tests of this folder would not see it either.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;
using torch::nn::Linear;

namespace {

constexpr int64_t side = 32;

/// Three layers, of which the second is on the last rank, with dropout, so that
/// tensors of 4 KB and more pass in both directions.
struct there_and_back_impl : torch::nn::Module {
  explicit there_and_back_impl(uint64_t ranks) {
    const auto other = static_cast<uint32_t>(ranks - 1);
    auto on = [&](uint32_t rank, const char* name) {
      partition_scope scope{rank};
      auto result = submodule<Linear>(side, side);
      register_module(name, result);
      return result;
    };
    first = on(0, "first");
    far = on(other, "far");
    {
      partition_scope scope{other};
      drop = submodule<torch::nn::Dropout>(0.3);
      register_module("drop", drop);
    }
    last = on(0, "last");
  }

  Tensor forward(Tensor x) {
    return last(drop(far(torch::tanh(first(x))))).square().mean();
  }

  submodule<Linear> first = nullptr, far = nullptr, last = nullptr;
  submodule<torch::nn::Dropout> drop = nullptr;
};
TORCH_MODULE_IMPL(there_and_back, there_and_back_impl);

struct outcome {
  std::vector<double> losses;
  std::string race;
  std::string error;
  /// Tensors that rank 0 has sent by its arena.
  uint64_t lent = 0;
};

void train(session& s, outcome& out) {
  distributed_model model{
    test::seeded([&] { return there_and_back{s.size()}; })};
  torch::optim::SGD sgd{model.local_parameters(), 0.1};
  distributed_optimizer optimizer{sgd};
  auto train_step = training_step(model);
  for (int i = 0; i < 4; ++i) {
    auto x = torch::sin(torch::arange(512 * side * 1.0) * (i + 1))
               .view({512, side})
               .to(torch::kFloat);
    optimizer.zero_grad();
    auto loss = train_step(x).reduce_mean();
    if (s.rank() == 0)
      out.error += s.last_step().ran_again;
    optimizer.step();
    if (s.rank() == 0)
      out.losses.push_back(loss.item<double>());
  }
  if (s.rank() == 0)
    out.lent = s.internals().communication().sent[0];
}

virtual_world_options device_world(uint64_t ranks) {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = ranks;
  world.config.microbatches = 8;
  world.config.active_microbatches = 8;
  world.config.auto_partition = false;
  world.config.device = "sim";
  world.config.threads = 1;
  return world;
}

/// @param peers whether devices reach each other
outcome run(bool peers, uint64_t ranks = 2) {
  outcome result;
  checked_devices devices{200};
  sim::config().no_peers = !peers;
  try {
    run_virtual_world(ranks, device_world(ranks),
                      [&](session& s) { train(s, result); });
  } catch (const std::exception& e) {
    result.error += e.what();
  }
  result.race = devices.race();
  return result;
}

/// @returns the mean loss of a step, or why it failed
template <class Step>
std::pair<double, std::string> train_once(Step& train_step, const Tensor& x,
                                          bool) {
  try {
    return {train_step(x).reduce_mean().template item<double>(), ""};
  } catch (const error& e) {
    return {0, e.what()};
  }
}

/// @param held keeps the device from beginning before four have started, which
/// is for ever if there is a bound
/// @returns how many microbatches the device still worked for, at most, when
/// another one started
int most_ahead(bool held) {
  std::atomic<int> ahead = 0;
  int result = 0;
  run_virtual_world(1, device_world(1), [&](session&) {
    distributed_model model{test::seeded([&] { return there_and_back{1}; })};
    c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};
    auto compute = guard.getStream(sim_device());
    std::optional<held_stream> hold;
    int started = 0;
    auto train_step = step([&](Tensor x) {
      result = std::max(result, ahead.load());
      if (++started == 4)
        hold.reset();
      auto loss = model(x);
      ++ahead;
      sim::notify(0, compute.id(), [&ahead] { --ahead; });
      model.backward(loss);
      return loss;
    });
    model.partition();
    if (held)
      hold.emplace(compute);
    train_step(torch::ones({8, side}));
  });
  return result;
}

outcome run_with(const char* name, bool peers) {
  sim::seed_mistake(name);
  auto result = run(peers);
  sim::seed_mistake(nullptr);
  return result;
}

/// But for the order in which gradients were added.
bool same_losses(const outcome& a, const outcome& b) {
  return std::ranges::equal(a.losses, b.losses, [](double x, double y) {
    return std::abs(x - y) <= 1e-4 * std::abs(y);
  });
}

} // namespace

TEST_CASE("mistakes with devices show in numbers, in races or as errors",
          "[runtime][device]") {
  auto peers = GENERATE(false, true);
  CAPTURE(peers);
  static const std::map<bool, outcome> both{{false, run(false)},
                                            {true, run(true)}};
  auto& right = both.at(peers);
  REQUIRE(right.error == "");
  REQUIRE(right.race == "");
  REQUIRE(right.losses.size() == 4);
  CHECK((right.lent > 0) == peers);
  auto* name = GENERATE("unawaited-arrival", "unawaited-departure",
                        "unrecorded-stream", "early-reuse", "promise-on-host",
                        "random-numbers-of-host", "default-stream");
  if (peers && name == std::string{"early-reuse"})
    return; // of the memory through which tensors pass without peers
  auto wrong = run_with(name, peers);
  INFO(name << ": " << wrong.race << wrong.error);
  auto differs = !same_losses(wrong, right);
  CHECK((differs || wrong.race != "" || wrong.error != ""));
}

TEST_CASE("without a bound executions queue up on the device",
          "[runtime][device]") {
  CHECK(most_ahead(false) <= 2);
  sim::seed_mistake("unbounded-launches");
  CHECK(most_ahead(true) >= 3);
  sim::seed_mistake(nullptr);
}

TEST_CASE("the host waits for no device within a step", "[runtime][device]") {
  auto fast = GENERATE(std::optional<bool>{}, std::optional{false});
  auto replicas = GENERATE(false, true);
  CAPTURE(replicas);
  auto world = device_world(replicas ? 1 : 2);
  world.config.fast_mode = fast;
  world.config.ddp = replicas;
  sim::host_wait_counts waits;
  rank_device::memory memory;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{
      test::seeded([&] { return there_and_back{replicas ? 1 : s.size()}; })};
    auto train_step = training_step(model);
    // What calls return, and the sizes of what operators return, is learnt.
    for (int i = 0; i < 4; ++i) {
      // All ranks are done with the last step.
      barrier();
      sim::reset_host_waits();
      barrier();
      train_step(torch::ones({512, side}));
    }
    if (s.rank() == 0) {
      waits = sim::host_waits();
      memory = s.internals().launches()->last_memory();
    }
  });
  CAPTURE(waits.by_name, waits.last);
  CHECK(waits.number == 0);
  // Meanwhile it looked at the memory, which holds two layers and gradients.
  CHECK(memory.now >= 4 * side * side * sizeof(float));
  CHECK(memory.peak > memory.now);
  CHECK(memory.total == sim::config().capacity);
}

TEST_CASE("after a step that failed on a device the next one is right",
          "[runtime][device]") {
  checked_devices devices;
  std::vector<double> losses;
  std::string why;
  run_virtual_world(2, device_world(2), [&](session& s) {
    distributed_model model{
      test::seeded([&] { return there_and_back{s.size()}; })};
    auto fails = true;
    int microbatch = 0;
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      if (fails && ++microbatch % 8 == 4) // also when it runs again
        throw std::runtime_error{"on purpose"};
      model.backward(loss);
      return loss;
    });
    auto x = torch::ones({512, side});
    model.eval(); // without dropout, all microbatches have the same loss
    auto right = train_once(train_step, x, fails = false);
    for (auto& p : model.local_parameters())
      p.mutable_grad() = Tensor{};
    auto error = train_once(train_step, x, fails = true);
    auto again = train_once(train_step, x, fails = false);
    if (s.rank() != 0)
      return;
    why = error.second;
    losses = {right.first, again.first};
  });
  CHECK_THAT(why, ContainsSubstring("on purpose"));
  REQUIRE(losses.size() == 2);
  CHECK(losses[0] == losses[1]);
  CHECK(devices.race() == "");
}

TEST_CASE("who waits for a device that stands still says so",
          "[runtime][device]") {
  auto world = device_world(2);
  world.config.stall_timeout = 0.5;
  std::string told;
  std::optional<held_stream> hold;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{
      test::seeded([&] { return there_and_back{s.size()}; })};
    auto train_step = training_step(model);
    model.partition();
    if (s.rank() == 0) {
      c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};
      hold.emplace(guard.getStream(sim_device()));
      on_stall(s, [&](const std::string& text, bool) {
        told = text;
        hold.reset();
      });
    }
    train_step(torch::ones({512, side}));
  });
  CHECK_THAT(told, ContainsSubstring("device"));
}

TEST_CASE("one rank computes on a device what two do", "[runtime][device]") {
  auto one = run(true, 1);
  CHECK(one.error == "");
  CHECK(one.race == "");
  CHECK(same_losses(one, run(true)));
}
