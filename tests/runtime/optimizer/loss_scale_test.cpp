#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// The scale of the loss in sessions (R56).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 4;

session_config grid(uint64_t pipeline, bool ddp, bool shards = false) {
  session_config result;
  result.pipeline_parallel_degree = pipeline;
  result.microbatches = 2;
  result.ddp = ddp;
  result.shard_optimizer_state = shards;
  result.threads = 1;
  return result;
}

Tensor data_of(int64_t step) {
  return torch::sin(torch::arange(8 * width).view({8, width}) * 0.3 + step);
}

/// Of a rank, after each step.
struct rank_run {
  std::vector<bool> updated;
  std::vector<double> scales;
  std::vector<double> norms;
  std::vector<numbers> gradients;
  std::vector<numbers> parameters;
};

struct scaled_job {
  session_config config;
  uint64_t ranks = 1;
  optimizer_options options = {};
  int64_t steps = 5;
  /// What the loss of a replica is multiplied by.
  std::function<double(uint64_t dp_rank, int64_t step)> factor =
    [](uint64_t, int64_t) { return 1.0; };
  /// Gradients stay in these steps.
  std::vector<int64_t> adds_up = {};
};

std::vector<rank_run> train(const scaled_job& x) {
  std::vector<rank_run> result(x.ranks);
  std::mutex mutex;
  virtual_world_options world;
  world.config = x.config;
  world.reorder = true;
  run_virtual_world(x.ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return two_layers{width, width}; })};
    set_partition(*model->second,
                  static_cast<uint32_t>(x.config.pipeline_parallel_degree - 1));
    torch::optim::SGD sgd{model->parameters(),
                          torch::optim::SGDOptions(0.1).momentum(0.9)};
    distributed_optimizer optimizer{sgd, x.options};
    auto train_step = step([&](Tensor data, double factor) {
      auto loss = model(data).square().mean() * factor;
      model.backward(loss);
      return loss;
    });
    rank_run mine;
    for (int64_t i = 0; i < x.steps; ++i) {
      if (std::ranges::find(x.adds_up, i) == x.adds_up.end())
        optimizer.zero_grad();
      auto type = x.config.fp16_params ? torch::kHalf : torch::kFloat;
      auto part = data_of(i).to(type).chunk(static_cast<int64_t>(dp_size()));
      train_step(part.at(dp_rank()), x.factor(dp_rank(), i));
      auto gradients = model.gradients();
      mine.gradients.emplace_back(gradients.begin(), gradients.end());
      mine.norms.push_back(clip_grad_norm_(model, 0.2));
      mine.updated.push_back(optimizer.step());
      mine.scales.push_back(optimizer.loss_scale());
      auto state = model.state_dict();
      mine.parameters.emplace_back(state.begin(), state.end());
    }
    std::unique_lock guard{mutex};
    result[s.rank()] = std::move(mine);
  });
  return result;
}

/// One process in plain torch, without any scale.
/// @param skipped steps that update nothing
std::vector<numbers> train_alone(int64_t steps,
                                 const std::vector<int64_t>& skipped,
                                 const std::vector<int64_t>& adds_up) {
  auto model = seeded([] { return two_layers_of<as_is>{width, width}; });
  torch::optim::SGD sgd{model.parameters(),
                        torch::optim::SGDOptions(0.1).momentum(0.9)};
  std::vector<numbers> result;
  auto among = [](const std::vector<int64_t>& xs, int64_t i) {
    return std::ranges::find(xs, i) != xs.end();
  };
  for (int64_t i = 0; i < steps; ++i) {
    if (!among(adds_up, i))
      sgd.zero_grad();
    model.forward(data_of(i)).square().mean().backward();
    if (!among(skipped, i)) {
      torch::NoGradGuard no_grad;
      double squares = 0;
      for (auto& p : model.parameters())
        squares += std::pow(p.grad().norm().item<double>(), 2);
      for (auto& p : model.parameters())
        p.mutable_grad().mul_(std::min(1.0, 0.2 / (std::sqrt(squares) + 1e-6)));
      sgd.step();
    }
    auto& after = result.emplace_back();
    for (auto& p : model.named_parameters())
      after.emplace(p.key(), p.value().detach().clone());
  }
  return result;
}

void check_parameters(const std::vector<rank_run>& mine,
                      const std::vector<numbers>& expected) {
  for (auto& rank : mine)
    for (size_t i = 0; i < expected.size(); ++i) {
      INFO("step " << i);
      check_near(rank.parameters.at(i), expected[i]);
    }
}

const dynamic_loss_args quick{.init_scale = 1024, .scale_window = 2};

} // namespace

TEST_CASE("a scale of the loss changes no number that is told",
          "[runtime][precision][R56]") {
  auto shards = GENERATE(false, true);
  optimizer_options options = GENERATE(
    optimizer_options{.static_loss_scale = 512},
    optimizer_options{.static_loss_scale = 3}, // is not exact
    optimizer_options{.dynamic_loss_scale = true, .dynamic_loss_args = quick});
  CAPTURE(shards, options.dynamic_loss_scale);
  // Gradients add up, also over a change of the scale.
  const std::vector<int64_t> adds_up{2, 4};
  scaled_job job{grid(2, true, shards), 4};
  job.adds_up = adds_up;
  auto plain = train(job);
  job.options = options;
  auto scaled = train(job);
  for (size_t rank = 0; rank < 4; ++rank)
    for (size_t i = 0; i < 5; ++i) {
      CAPTURE(rank, i);
      CHECK(scaled[rank].updated[i]);
      CHECK(scaled[rank].norms[i]
            == Catch::Approx(plain[rank].norms[i]).epsilon(1e-5));
      check_near(scaled[rank].gradients[i], plain[rank].gradients[i]);
    }
  check_parameters(scaled, train_alone(5, {}, adds_up));
  auto& scales = scaled[3].scales;
  if (options.dynamic_loss_scale)
    CHECK(scales == std::vector<double>{1024, 2048, 2048, 4096, 4096});
  else
    CHECK(scales == std::vector<double>(5, *options.static_loss_scale));
}

TEST_CASE(
  "gradients that are not finite anywhere update nothing, and the "
  "scale falls on all ranks",
  "[runtime][precision][R56]") {
  auto [pipeline, ranks, shards] = GENERATE(
    std::tuple{1u, 1u, false}, std::tuple{2u, 2u, false},
    std::tuple{2u, 4u, false}, std::tuple{2u, 4u, true});
  CAPTURE(pipeline, ranks, shards);
  scaled_job x{grid(pipeline, ranks > pipeline, shards),
               ranks,
               {.dynamic_loss_scale = true, .dynamic_loss_args = quick}};
  // The loss is finite; multiplied by the scale its gradient is not.
  x.factor = [&](uint64_t dp_rank, int64_t step) {
    return step == 1 && dp_rank + 1 == ranks / pipeline ? 1e37 : 1.0;
  };
  auto mine = train(x);
  for (auto& rank : mine) {
    CHECK(rank.updated == std::vector<bool>{true, false, true, true, true});
    CHECK(rank.scales == std::vector<double>{1024, 512, 512, 1024, 1024});
  }
  check_parameters(mine, train_alone(5, {1}, {}));
}

namespace {

/// A slice has columns of the weight; the gradient of the last one is that of
/// the last feature alone.
struct shared_layer_impl : torch::nn::Module {
  shared_layer_impl() {
    register_module("layer", layer);
    torch::NoGradGuard no_grad;
    layer->weight.select(1, width - 1).zero_();
  }

  Tensor forward(Tensor x) {
    return layer(x);
  }

  submodule<torch::nn::Linear> layer{width, 1};
};
TORCH_MODULE_IMPL(shared_layer, shared_layer_impl);

} // namespace

TEST_CASE("a slice that is not finite on one rank updates nothing on its peer",
          "[runtime][precision][tensor_parallel][R56]") {
  using flags = std::vector<bool>;
  std::vector<flags> finite(2), updated(2);
  std::vector<std::vector<double>> scales(2);
  virtual_world_options world;
  world.config = grid(1, true);
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"layer"};
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return shared_layer{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{
      sgd, {.dynamic_loss_scale = true, .dynamic_loss_args = quick}};
    auto train_step = training_step(model, mean_square_of);
    for (int64_t i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      auto x = data_of(i).chunk(2).at(dp_rank()).clone();
      x.select(1, width - 1).fill_(i == 1 ? 1e37 : 0.0);
      train_step(x);
      auto here = true;
      for (auto& p : model.local_parameters())
        if (p.grad().defined())
          here = here && torch::isfinite(p.grad()).all().item<bool>();
      finite[s.rank()].push_back(here);
      updated[s.rank()].push_back(optimizer.step());
      scales[s.rank()].push_back(optimizer.loss_scale());
    }
  });
  CHECK(finite[0] == flags{true, true, true});
  CHECK(finite[1] == flags{true, false, true});
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(updated[rank] == flags{true, false, true});
    CHECK(scales[rank] == std::vector<double>{1024, 512, 512});
  }
}

TEST_CASE("a loss scale that cannot fall ends the run by name",
          "[runtime][precision][R56]") {
  scaled_job x{grid(2, false),
               2,
               {.dynamic_loss_scale = true,
                .dynamic_loss_args = {.init_scale = 2, .min_scale = 1}}};
  x.factor = [](uint64_t, int64_t) {
    return std::numeric_limits<double>::infinity();
  };
  CHECK_THAT(error_of([&] { train(x); }, error_code::numbers),
             ContainsSubstring("dynamic_loss_args.min_scale"));
}

TEST_CASE("float16 parameters have a dynamic scale unless code gives another",
          "[runtime][precision][R56]") {
  // Gradients that float16 has no values for.
  auto tiny = [](uint64_t, int64_t) { return 1e-7; };
  auto norm_of = [&](bool float16, const optimizer_options& options) {
    auto config = grid(2, false);
    config.fp16_params = float16;
    auto runs = train({config, 2, options, 1, tiny});
    return runs[0].norms[0];
  };
  auto expected = norm_of(false, {});
  CHECK(norm_of(true, {}) == Catch::Approx(expected).epsilon(0.02));
  CHECK(norm_of(true, {.static_loss_scale = 1}) < expected / 2);
}

TEST_CASE("two scales for one model, or of one optimizer, are refused",
          "[runtime][precision][R56]") {
  virtual_world_options world;
  world.config.threads = 1;
  std::vector<std::string> said;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([] { return two_layers{width, width}; })};
    torch::optim::SGD a{model->first->parameters(), 0.1};
    torch::optim::SGD b{model->second->parameters(), 0.1};
    auto refused = [&](const optimizer_options& x) {
      said.push_back(error_of([&] { distributed_optimizer{b, x}; }));
    };
    distributed_optimizer first{a, {.static_loss_scale = 8}};
    refused({.static_loss_scale = 8});
    refused({.static_loss_scale = 8, .dynamic_loss_scale = true});
    distributed_optimizer second{b};
    if (second.loss_scale() != 8)
      said.emplace_back("not the scale of the model");
  });
  REQUIRE(said.size() == 2);
  CHECK_THAT(said[0], ContainsSubstring("another optimizer of the model"));
  CHECK_THAT(said[1], ContainsSubstring("cannot go with static_loss_scale"));
}
