#include "tests/support/catch.hpp"

#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

// A trace on the device of the rank, before the partition.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

namespace {

constexpr int64_t side = 64;

struct row_impl : torch::nn::Module {
  explicit row_impl(int64_t side) {
    for (int i = 0; i < 4; ++i) {
      body->push_back(torch::nn::Linear{side, side});
      body->push_back(torch::nn::BatchNorm1d{side});
      body->push_back(torch::nn::Dropout{0.2});
    }
    register_module("body", body);
  }

  Tensor forward(Tensor x) {
    return body->forward(x).square().mean();
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(row, row_impl);

struct traced {
  std::string text;
  std::vector<double> losses;
  double activations = 0;
};

traced train(const char* trace_device) {
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  world.config.trace_device = trace_device;
  traced result;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return row{side}; })};
    if (s.rank() == 0)
      s.internals().state()->on_decision([&](const partition_decision& x) {
        for (auto& m : x.model)
          result.activations += m.activations;
      });
    auto train_step = training_step(model);
    for (int i = 0; i < 2; ++i) {
      auto loss = train_step(torch::ones({32, side}).cumsum(0)).reduce_mean();
      if (s.rank() == 0)
        result.losses.push_back(loss.item<double>());
    }
    if (s.rank() == 0)
      result.text = model.partition_text();
  });
  return result;
}

/// Of the one kernel of a module.
constexpr std::chrono::milliseconds busy_time{5};

struct busy_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    auto device = sim::current_device();
    sim::launch(device, sim::current_stream(device), "busy kernel", [] {
      auto end = std::chrono::steady_clock::now() + busy_time;
      while (std::chrono::steady_clock::now() < end) {
        // This is what takes the time.
      }
    });
    return x * 2;
  }
};
TORCH_MODULE_IMPL(busy, busy_impl);

struct busy_row_impl : torch::nn::Module {
  explicit busy_row_impl(std::function<void()> f) : called(std::move(f)) {
    register_module("before", before);
    register_module("busy", slow);
    register_module("after", after);
  }

  Tensor forward(Tensor x) {
    called();
    return after(slow(before(x))).square().mean();
  }

  std::function<void()> called;
  submodule<torch::nn::Linear> before{side, side};
  submodule<busy> slow;
  submodule<torch::nn::Linear> after{side, side};
};
TORCH_MODULE_IMPL(busy_row, busy_row_impl);

} // namespace

TEST_CASE("a model that does not fit on a device is measured on the CPU",
          "[runtime][device][trace]") {
  // No room for the parameters, or for what the forward phase makes of them.
  auto capacity = GENERATE(14 << 20, 20 << 20);
  CAPTURE(capacity);
  auto small = sim::config();
  small.capacity = static_cast<size_t>(capacity);
  sim::changed_options now{small};
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  std::string basis;
  auto body = [&](session& s) {
    const int64_t wide = 1024; // 16 MB
    distributed_model model{seeded([wide] { return row{wide}; })};
    if (s.rank() == 0)
      s.internals().state()->on_decision(
        [&](const partition_decision& x) { basis = x.plan.options.basis; });
    auto train_step = training_step(model);
    // There is no room for gradients, either.
    train_step(torch::ones({1024, wide}));
  };
  CHECK_THROWS_WITH(run_virtual_world(2, world, body),
                    ContainsSubstring("out of memory"));
  CHECK_THAT(basis, ContainsSubstring("measured on the CPU"));
}

TEST_CASE("a device is ready before the first module is measured",
          "[runtime][device][trace]") {
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  uint64_t begun = 0, waits = 0;
  run_virtual_world(2, world, [&](session& s) {
    auto traces = s.rank() == 0;
    distributed_model model{seeded([&] {
      return busy_row{[&, traces] {
        if (traces && begun++ == 0)
          waits = sim::host_waits().by_name["stream"];
      }};
    })};
    auto train_step = training_step(model);
    barrier();
    if (traces)
      sim::reset_host_waits();
    train_step(torch::ones({4, side}));
  });
  CHECK(begun > 0);
  CHECK(waits > 0);
}

TEST_CASE("modules take the time of their kernels, for which no host waits",
          "[runtime][device][trace]") {
  checked_devices devices{0};
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  std::map<std::string, double> seconds;
  uint64_t passes = 0, waits = 0;
  run_virtual_world(2, world, [&](session& s) {
    auto traces = s.rank() == 0;
    distributed_model model{seeded([&] {
      return busy_row{[&, traces] {
        if (!traces || waits > 0)
          return;
        if (passes++ == 0)
          sim::reset_host_waits();
      }};
    })};
    if (traces)
      s.internals().state()->on_decision([&](const partition_decision& x) {
        for (auto& m : x.model)
          seconds[m.path] = m.compute.value_or(0);
        waits = sim::host_waits().by_name["stream"];
      });
    auto train_step = training_step(model);
    train_step(torch::ones({4, side}));
  });
  REQUIRE(seconds.size() == 4);
  CHECK(seconds["busy"] >= std::chrono::duration<double>(busy_time).count());
  CHECK(waits <= passes + 1);
}

TEST_CASE("modules are measured on the device of the rank",
          "[runtime][device][trace]") {
  checked_devices devices;
  sim::reset_peak(0);
  auto on_host = train("cpu"), on_device = train("auto");
  CHECK_THAT(on_host.text, ContainsSubstring("measured on the CPU"));
  CHECK_THAT(on_device.text, ContainsSubstring("measured on the GPU")
                               && !ContainsSubstring("cannot be traced"));
  // Of operations, which a device may divide otherwise, and not of the model.
  CHECK(on_device.activations > on_host.activations / 2);
  CHECK(on_device.activations < on_host.activations * 1.5);
  // The trace leaves no trace in numbers, however modules are placed.
  REQUIRE(on_device.losses.size() == 2);
  for (size_t i = 0; i < 2; ++i)
    CHECK(on_device.losses[i]
          == Catch::Approx(on_host.losses[i]).epsilon(1e-5));
  CHECK(devices.race() == "");
}
