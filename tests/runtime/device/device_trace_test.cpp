#include "tests/support/catch.hpp"

#include "tests/simulated/driver/memory.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

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
};

traced train(const char* trace_device) {
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  world.config.trace_device = trace_device;
  traced result;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return row{side}; })};
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

} // namespace

TEST_CASE("a model that does not fit on a device is measured on the CPU",
          "[runtime][device][trace]") {
  auto small = sim::config();
  small.capacity = 14 << 20;
  sim::changed_options now{small};
  auto world = manual_world(2, 2);
  world.config.auto_partition = true;
  world.config.device = "sim";
  world.config.trace_device = "gpu";
  std::string basis;
  auto body = [&](session& s) {
    const int64_t wide = 1024; // 16 MB
    distributed_model model{seeded([wide] { return row{wide}; })};
    if (s.rank() == 0)
      s.internals().state()->on_decision(
        [&](const partition_decision& x) { basis = x.plan.options.basis; });
    auto train_step = training_step(model);
    // There is no room for gradients, either.
    train_step(torch::ones({2, wide}));
  };
  CHECK_THROWS_WITH(run_virtual_world(2, world, body),
                    ContainsSubstring("out of memory"));
  CHECK_THAT(basis, ContainsSubstring("measured on the CPU"));
}

TEST_CASE("modules are measured on the device of the rank",
          "[runtime][device][trace]") {
  checked_devices devices;
  sim::reset_peak(0);
  auto on_host = train("cpu"), on_device = train("gpu");
  CHECK_THAT(on_host.text, ContainsSubstring("measured on the CPU"));
  CHECK_THAT(on_device.text, ContainsSubstring("measured on the GPU")
                               && !ContainsSubstring("cannot be traced"));
  // The trace leaves no trace in numbers, however modules are placed.
  REQUIRE(on_device.losses.size() == 2);
  for (size_t i = 0; i < 2; ++i)
    CHECK(on_device.losses[i]
          == Catch::Approx(on_host.losses[i]).epsilon(1e-5));
  CHECK(devices.race() == "");
}
