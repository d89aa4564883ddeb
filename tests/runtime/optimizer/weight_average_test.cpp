#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

// Averages of weights (docs/precision.md).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr double decay = 0.75;

using numbers = std::map<std::string, Tensor>;

Tensor data_of(int64_t step, torch::ScalarType type) {
  return torch::sin(torch::arange(32).view({8, 4}) * 0.3 + step).to(type);
}

struct average_job {
  uint64_t pipeline = 1;
  uint64_t replicas = 1;
  bool shards = false;
  bool half = false;
  int64_t steps = 5;

  torch::ScalarType type() const {
    return half ? torch::kBFloat16 : torch::kFloat;
  }
};

/// @returns the averages after the last step, by one process in plain torch
numbers average_alone(const average_job& x) {
  auto model = seeded([] { return two_layers_of<as_is>{}; });
  model.to(x.type());
  auto parameters = model.named_parameters();
  std::vector<Tensor> weights, averages;
  for (auto& p : parameters)
    weights.push_back(
      p.value().detach().to(torch::kFloat).clone().set_requires_grad(true));
  torch::optim::SGD sgd{weights, 0.5};
  for (int64_t i = 0; i < x.steps; ++i) {
    std::vector<Tensor> sums(weights.size());
    for (auto& part :
         data_of(i, x.type()).chunk(static_cast<int64_t>(x.replicas))) {
      model.zero_grad();
      model.forward(part).to(torch::kFloat).square().mean().backward();
      for (size_t k = 0; k < sums.size(); ++k) {
        auto g = parameters[k].value().grad().to(torch::kFloat);
        sums[k] = sums[k].defined() ? sums[k] + g : g;
      }
    }
    torch::NoGradGuard no_grad;
    for (size_t k = 0; k < sums.size(); ++k)
      weights[k].mutable_grad() = (sums[k] / static_cast<double>(x.replicas))
                                    .to(x.type())
                                    .to(torch::kFloat);
    sgd.step();
    for (size_t k = 0; k < sums.size(); ++k) {
      parameters[k].value().copy_(weights[k]);
      auto weight = weights[k].detach();
      if (i == 0)
        averages.push_back(weight.clone());
      else
        averages[k] = decay * averages[k] + (1 - decay) * weight;
    }
  }
  numbers result;
  for (size_t k = 0; k < averages.size(); ++k)
    result.emplace(parameters[k].key(), averages[k].to(x.type()));
  return result;
}

/// Goes on from a checkpoint in `dir`, if there is one, and saves the end.
numbers average_ranks(const average_job& x, const std::string& dir) {
  numbers result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = x.pipeline;
  world.config.ddp = x.replicas > 1;
  world.config.shard_optimizer_state = x.shards;
  world.config.bf16_params = x.half;
  world.config.threads = 1;
  world.reorder = true;
  run_virtual_world(x.pipeline * x.replicas, world, [&](session& s) {
    distributed_model model{seeded([] { return two_layers{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.5};
    distributed_optimizer optimizer{sgd, {.ema_decay = decay}};
    auto from = resume_from_checkpoint(dir, model, {&optimizer});
    place_in_turn(model);
    auto train_step = step([&](Tensor data) {
      auto loss = model(data).to(torch::kFloat).square().mean();
      model.backward(loss);
      return loss;
    });
    for (auto i = from ? static_cast<int64_t>(from->step) : 0; i < x.steps;
         ++i) {
      optimizer.zero_grad();
      train_step(data_of(i, x.type())
                   .chunk(static_cast<int64_t>(x.replicas))
                   .at(dp_rank()));
      optimizer.step();
    }
    save_checkpoint(dir, static_cast<uint64_t>(x.steps), model, {&optimizer});
    auto before = model.state_dict();
    optimizer.swap_averages();
    auto averages = model.state_dict();
    auto refused = error_of([&] { optimizer.step(); });
    optimizer.swap_averages();
    auto after = model.state_dict();
    for (size_t i = 0; i < before.size(); ++i)
      if (!torch::equal(before[i].second, after[i].second))
        throw std::runtime_error{before[i].first + " did not come back"};
    if (refused.find("swap_averages") == std::string::npos)
      throw std::runtime_error{"a step with averages: " + refused};
    std::unique_lock guard{mutex};
    if (s.rank() + 1 == x.pipeline * x.replicas)
      result = {averages.begin(), averages.end()};
  });
  return result;
}

} // namespace

TEST_CASE("averages of weights are those of one process, and are saved",
          "[runtime][precision][R51]") {
  auto [pipeline, replicas, shards] = GENERATE(std::tuple{1u, 1u, false},
                                               std::tuple{2u, 2u, false},
                                               std::tuple{2u, 2u, true});
  auto half = GENERATE(false, true);
  CAPTURE(pipeline, replicas, shards, half);
  scratch_dir dir;
  average_job first{pipeline, replicas, shards, half, 2};
  average_ranks(first, dir.path.string());
  // Without the first part's grid of parameters.
  average_job second{pipeline, replicas, replicas > 1 && !shards, half, 5};
  auto mine = average_ranks(second, dir.path.string());
  auto expected = average_alone(second);
  REQUIRE(mine.size() == expected.size());
  for (auto& [name, x] : expected) {
    INFO(name);
    auto bound = (half ? 0x1p-8 : 1e-5) * x.abs().max().item<double>() + 1e-7;
    CHECK((mine.at(name) - x).abs().max().item<double>() <= bound);
  }
}

TEST_CASE("averages that cannot be are refused by name",
          "[runtime][precision]") {
  virtual_world_options world;
  world.config.threads = 1;
  std::vector<std::string> said;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([] { return two_layers{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.5};
    for (double bad : {0.0, 1.0})
      said.push_back(error_of([&] {
        distributed_optimizer{sgd, {.ema_decay = bad}};
      }));
    distributed_optimizer optimizer{sgd};
    said.push_back(error_of([&] { optimizer.swap_averages(); }));
  });
  REQUIRE(said.size() == 3);
  CHECK_THAT(said[0], ContainsSubstring("ema_decay = 0"));
  CHECK_THAT(said[1], ContainsSubstring("ema_decay = 1"));
  CHECK_THAT(said[2], ContainsSubstring("without ema_decay"));
}

TEST_CASE("a weight that somebody set comes back after its average",
          "[runtime][precision]") {
  auto half = GENERATE(false, true);
  CAPTURE(half);
  average_job x{.half = half};
  virtual_world_options world;
  world.config.bf16_params = x.half;
  world.config.threads = 1;
  named_tensors before, after;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([] { return two_layers{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.5};
    distributed_optimizer optimizer{sgd, {.ema_decay = decay}};
    auto train_step = step([&](Tensor data) {
      auto loss = model(data).to(torch::kFloat).square().mean();
      model.backward(loss);
      return loss;
    });
    train_step(data_of(0, x.type()));
    optimizer.step();
    before = model.state_dict();
    for (auto& [name, y] : before)
      y = torch::full_like(y, 0.25);
    model.load_state_dict(before);
    optimizer.swap_averages();
    optimizer.swap_averages();
    after = model.state_dict();
  });
  REQUIRE(after.size() == before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    INFO(before[i].first);
    CHECK(torch::equal(after[i].second, before[i].second));
  }
}
