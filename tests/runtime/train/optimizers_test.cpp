#include "tests/support/catch.hpp"

#include "runtime/train/optimizers.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>
#include <torch/utils.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Optimizers of a configuration over parameters of which a rank owns a part.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 256;
constexpr int64_t layer_count = 4;
constexpr int64_t layer_bytes = 4 * width * width;

template <template <class> class P>
struct tower_impl : torch::nn::Module {
  tower_impl() {
    for (int64_t i = 0; i < layer_count; ++i) {
      layers.emplace_back(width, width);
      register_module("layer" + std::to_string(i), layers.back());
    }
  }

  Tensor forward(Tensor x) {
    for (auto& layer : layers)
      x = torch::tanh(layer(x));
    return x.square().mean();
  }

  std::vector<P<torch::nn::Linear>> layers;
};

struct distributed_tower_impl : tower_impl<submodule> {};
TORCH_MODULE_IMPL(distributed_tower, distributed_tower_impl);

optimizer_config adagrad() {
  optimizer_config x;
  x.type = "adagrad";
  x.lr = 0.1;
  x.eps = 1; // else the last place of a small gradient decides its sign
  return x;
}

Tensor data_of(int64_t step) {
  return torch::sin(torch::arange(8.0 * width).view({8, width}) * 0.01 + step)
    .to(torch::kFloat);
}

numbers train_alone(int64_t steps) {
  auto model = seeded([] { return tower_impl<as_is>{}; });
  auto optimizer = make_optimizer(adagrad(), model.parameters());
  for (int64_t i = 0; i < steps; ++i) {
    optimizer->zero_grad();
    model.forward(data_of(i)).backward();
    optimizer->step();
  }
  numbers result;
  for (auto& p : model.named_parameters())
    result.emplace(p.key(), p.value().detach().clone());
  return result;
}

struct adagrad_run {
  std::vector<live_bytes> bytes; // by rank: until the partition is done
  std::vector<numbers> parameters;
};

/// @param shards two replicas share the state; else two ranks share the layers
adagrad_run train_two(bool shards, bool deferred, int64_t steps) {
  adagrad_run result;
  result.bytes.resize(2);
  result.parameters.resize(2);
  virtual_world_options world;
  world.config.threads = 1;
  world.config.ddp = world.config.shard_optimizer_state = shards;
  world.config.pipeline_parallel_degree = shards ? 1 : 2;
  world.config.trace_device = "none";
  world.config.auto_partition = false;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] {
      delay_param_initialization scope{deferred};
      return distributed_tower{};
    })};
    for (size_t i = 0; i < model->layers.size(); ++i)
      set_partition(*model->layers[i], !shards && i >= layer_count / 2 ? 1 : 0);
    auto bytes = std::make_shared<live_bytes>();
    std::unique_ptr<torch::optim::Optimizer> inner;
    std::optional<distributed_optimizer> optimizer;
    {
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      inner = make_optimizer(adagrad(), model->parameters(), true);
      optimizer.emplace(*inner);
      model.partition();
    }
    result.bytes[s.rank()] = *bytes;
    auto train_step = training_step(model);
    for (int64_t i = 0; i < steps; ++i) {
      optimizer->zero_grad();
      train_step(shards ? data_of(i).chunk(2).at(dp_rank()) : data_of(i));
      optimizer->step();
    }
    auto state = model.state_dict();
    result.parameters[s.rank()] = {state.begin(), state.end()};
  });
  return result;
}

} // namespace

TEST_CASE("no rank makes the sums of what it does not update",
          "[runtime][optimizer][memory]") {
  constexpr int64_t small = 64 << 10;
  auto mine = train_two(true, false, 0);
  for (auto& x : mine.bytes) {
    CHECK(x.now <= layer_count / 2 * layer_bytes + small);
    CHECK(x.peak <= x.now + layer_bytes + small);
  }
}

TEST_CASE("an optimizer leaves parameters deferred until the partition",
          "[runtime][optimizer][memory]") {
  constexpr int64_t small = 64 << 10;
  auto mine = train_two(false, true, 0);
  // Of what the rank owns, the parameters and their sums; one tensor more.
  for (auto& x : mine.bytes)
    CHECK(x.peak <= 2 * layer_count / 2 * layer_bytes + layer_bytes + small);
}

TEST_CASE("sums that were made at the partition are those of LibTorch",
          "[runtime][optimizer]") {
  auto shards = GENERATE(false, true);
  auto deferred = GENERATE(false, true);
  CAPTURE(shards, deferred);
  auto expected = train_alone(3);
  for (auto& x : train_two(shards, deferred, 3).parameters)
    if (!x.empty())
      check_near(x, expected, {.least = 1e-5});
}
