#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

// Parameters in half precision with float32 weights in the optimizer (R56).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 50;
constexpr int64_t width = 8;
constexpr int64_t inner = 3000; // 48 KB in half precision: more than 4 KB
constexpr int64_t microbatches = 2;

/// Rows that do not divide, one row, no axis, and one that has no gradient.
/// (Nothing is used twice: in half precision it matters in which order its
/// gradients are added.)
template <template <class> class P>
struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("table", table);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("never", never);
    register_module("head", head);
    scale = register_parameter("scale", torch::full({}, 0.5));
  }

  Tensor forward(Tensor x) {
    auto h = norm(table(x).mean(1));
    h = down(torch::tanh(up(h))) * scale;
    return head(h).to(torch::kFloat).square().mean();
  }

  P<torch::nn::Embedding> table{words, width};
  P<torch::nn::LayerNorm> norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  P<torch::nn::Linear> up{width, inner}, down{inner, width}, never{3, 3},
    head{width, 1};
  Tensor scale;
};

struct distributed_net_impl : net_impl<submodule> {};
TORCH_MODULE_IMPL(distributed_net, distributed_net_impl);

using optimizer_ptr = std::unique_ptr<torch::optim::Optimizer>;

optimizer_ptr make_optimizer(const std::string& type,
                             const std::vector<Tensor>& xs) {
  if (type == "adamw")
    return std::make_unique<torch::optim::AdamW>(
      xs, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
  if (type == "adagrad")
    return std::make_unique<torch::optim::Adagrad>(
      xs, torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1));
  return std::make_unique<torch::optim::SGD>(
    xs, torch::optim::SGDOptions(1e-2).momentum(0.9));
}

struct job {
  torch::ScalarType type = torch::kBFloat16;
  std::string optimizer = "adamw";
  uint64_t pipeline = 1;
  uint64_t replicas = 1;
  bool shards = false;
  double scale = 1;
  std::optional<double> clip = {};
  int64_t steps = 5;

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = pipeline;
    x.microbatches = microbatches;
    x.ddp = replicas > 1;
    x.shard_optimizer_state = shards;
    x.bf16_params = type == torch::kBFloat16;
    x.fp16_params = type == torch::kHalf;
    x.threads = 1;
    return x;
  }
};

Tensor data_of(uint64_t replicas, int64_t step) {
  auto rows = static_cast<int64_t>(4 * replicas);
  return (torch::arange(rows * 3).view({rows, 3}) * 7 + 11 * step) % words;
}

/// The float32 weights and the parameters, after each step.
struct training {
  std::vector<numbers> masters;
  std::vector<numbers> parameters;
  std::vector<double> norms;
};

/// One process in plain torch.
training train_alone(const job& x) {
  auto model = seeded([] { return net_impl<as_is>{}; });
  model.to(x.type);
  auto parameters = model.named_parameters();
  std::vector<Tensor> masters;
  for (auto& p : parameters)
    masters.push_back(
      p.value().detach().to(torch::kFloat).set_requires_grad(true));
  auto optimizer = make_optimizer(x.optimizer, masters);
  training result;
  for (int64_t i = 0; i < x.steps; ++i) {
    // Each replica adds up in half precision, and has a gradient of its own.
    std::vector<std::vector<Tensor>> gradients;
    for (auto& part :
         data_of(x.replicas, i).chunk(static_cast<int64_t>(x.replicas))) {
      model.zero_grad();
      for (auto& microbatch : part.chunk(microbatches))
        (model.forward(microbatch) * (x.scale / microbatches)).backward();
      auto& mine = gradients.emplace_back();
      for (auto& p : parameters)
        mine.push_back(p.value().grad());
    }
    torch::NoGradGuard no_grad;
    double squares = 0;
    std::vector<Tensor> means;
    for (size_t k = 0; k < masters.size(); ++k) {
      Tensor sum;
      for (auto& replica : gradients)
        if (auto& g = replica[k]; g.defined())
          sum = sum.defined() ? sum + g.to(torch::kFloat) : g.to(torch::kFloat);
      means.push_back(sum.defined()
                        ? (sum / static_cast<double>(x.replicas)).to(x.type)
                        : sum);
      if (sum.defined()) {
        auto norm = means[k].to(torch::kFloat).norm().item<double>();
        squares += norm * norm;
      }
    }
    result.norms.push_back(std::sqrt(squares) / x.scale);
    auto factor = x.clip ? *x.clip / (result.norms.back() + 1e-6) : 1.0;
    for (size_t k = 0; k < masters.size(); ++k) {
      auto& g = means[k];
      if (!g.defined())
        continue;
      if (factor < 1)
        g.mul_(factor);
      masters[k].mutable_grad() = g.to(torch::kFloat) / x.scale;
    }
    optimizer->step();
    auto& m = result.masters.emplace_back();
    auto& p = result.parameters.emplace_back();
    for (size_t k = 0; k < masters.size(); ++k) {
      parameters[k].value().copy_(masters[k]);
      m.emplace(parameters[k].key(), masters[k].detach().clone());
      p.emplace(parameters[k].key(), parameters[k].value().detach().clone());
    }
  }
  return result;
}

/// Puts what this rank's optimizer has of the weights where it belongs.
void note_masters(distributed_model_base& model,
                  const distributed_optimizer& optimizer, numbers& out) {
  for (auto& [name, p] : model.local_named_parameters()) {
    auto part = optimizer.part_of(p, nullptr);
    if (!part)
      continue;
    if (!part->is_master)
      throw std::runtime_error{name + " has no float32 weights"};
    auto [all, added] = out.emplace(name, Tensor{});
    if (added)
      all->second = torch::full(p.sizes(), std::nan(""));
    (part->where ? part->where->of(all->second) : all->second)
      .copy_(part->values.detach());
  }
}

struct run_options {
  std::string checkpoints = {};
  bool deferred = false;
};

training train_ranks(const job& x, const run_options& options = {}) {
  training result;
  result.masters.resize(static_cast<size_t>(x.steps));
  result.parameters.resize(static_cast<size_t>(x.steps));
  result.norms.resize(static_cast<size_t>(x.steps));
  std::mutex mutex;
  virtual_world_options world;
  world.config = x.config();
  world.reorder = true;
  run_virtual_world(x.pipeline * x.replicas, world, [&](session&) {
    distributed_model model{seeded([&] {
      delay_param_initialization deferring{options.deferred};
      return distributed_net{};
    })};
    auto inner = make_optimizer(x.optimizer, model->parameters());
    optimizer_options scaled;
    if (x.scale != 1 || x.type == torch::kHalf)
      scaled.static_loss_scale = x.scale;
    distributed_optimizer optimizer{*inner, scaled};
    uint64_t done = 0;
    if (!options.checkpoints.empty())
      if (auto from = resume_from_checkpoint(options.checkpoints, model,
                                             {&optimizer}))
        done = from->step;
    place_in_turn(model);
    auto train_step = training_step(model);
    for (auto i = static_cast<int64_t>(done); i < x.steps; ++i) {
      optimizer.zero_grad();
      for (auto& [name, p] : model.local_named_parameters())
        if (p.grad().defined() || (i > 0 && p.scalar_type() != x.type))
          throw std::runtime_error{"gradient or type of " + name};
      train_step(data_of(x.replicas, i)
                   .chunk(static_cast<int64_t>(x.replicas))
                   .at(dp_rank()));
      auto norm = clip_grad_norm_(model, x.clip.value_or(INFINITY));
      optimizer.step();
      auto after = model.state_dict();
      std::unique_lock guard{mutex};
      auto at = static_cast<size_t>(i);
      result.norms[at] = norm;
      result.parameters[at] = {after.begin(), after.end()};
      note_masters(model, optimizer, result.masters[at]);
    }
    if (!options.checkpoints.empty())
      save_checkpoint(options.checkpoints, static_cast<uint64_t>(x.steps),
                      model, {&optimizer});
  });
  return result;
}

/// @param first step to compare
void check(const training& mine, const training& expected, size_t first = 0) {
  for (auto i = first; i < expected.masters.size(); ++i) {
    INFO("step " << i);
    check_near(mine.masters.at(i), expected.masters[i]);
    check_near(mine.parameters.at(i), expected.parameters[i]);
    CHECK(mine.norms.at(i) == Catch::Approx(expected.norms[i]).epsilon(1e-5));
  }
}

} // namespace

TEST_CASE("parameters in half precision train as in one process in plain torch",
          "[runtime][precision][R56]") {
  auto type = GENERATE(torch::kBFloat16, torch::kHalf);
  auto [pipeline, replicas, shards] = GENERATE(
    std::tuple{1u, 1u, false}, std::tuple{2u, 1u, false},
    std::tuple{1u, 2u, false}, std::tuple{1u, 2u, true},
    std::tuple{2u, 2u, false}, std::tuple{2u, 2u, true});
  auto clip = GENERATE(std::optional<double>{}, std::optional<double>{0.01});
  CAPTURE(type, pipeline, replicas, shards, clip.value_or(0));
  job x{.type = type,
        .pipeline = pipeline,
        .replicas = replicas,
        .shards = shards,
        .scale = type == torch::kHalf ? 1024.0 : 1.0,
        .clip = clip};
  auto expected = train_alone(x);
  // The case says something only if the bound does.
  CHECK((!clip || expected.norms[0] > *clip));
  check(train_ranks(x), expected);
}

TEST_CASE("so they do with every optimizer", "[runtime][precision][R56]") {
  auto optimizer = GENERATE(as<std::string>{}, "sgd", "adagrad");
  auto shards = GENERATE(false, true);
  CAPTURE(optimizer, shards);
  job x{.optimizer = optimizer, .pipeline = 2, .replicas = 2, .shards = shards};
  check(train_ranks(x), train_alone(x));
}

TEST_CASE("what is made without bytes is cast when it gets them",
          "[runtime][precision][R56]") {
  job x{.pipeline = 2};
  check(train_ranks(x, {.deferred = true}), train_alone(x));
}

TEST_CASE("float32 weights go on from a checkpoint, in another grid too",
          "[runtime][precision][R56][R51]") {
  struct change {
    job before, after;
  };
  auto x = GENERATE(
    change{{.pipeline = 2, .steps = 2}, {.pipeline = 1}},
    change{{.replicas = 2, .shards = true, .steps = 2}, {.replicas = 2}},
    change{{.replicas = 2, .steps = 2},
           {.pipeline = 2, .replicas = 2, .shards = true}},
    change{{.type = torch::kHalf, .pipeline = 2, .scale = 256, .steps = 2},
           {.type = torch::kHalf, .pipeline = 2, .scale = 256}});
  scratch_dir dir;
  train_ranks(x.before, {.checkpoints = dir.path.string()});
  auto expected = train_alone(x.after);
  auto found = train_ranks(x.after, {.checkpoints = dir.path.string()});
  check(found, expected, 2);
}

TEST_CASE(
  "an update smaller than a parameter's last digit is not lost, and a "
  "parameter that is set anew counts",
  "[runtime][precision][R56]") {
  virtual_world_options world;
  world.config.bf16_params = true;
  world.config.threads = 1;
  std::vector<float> seen;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([] {
      return function{[](auto& self, Tensor x) { return x * self.weight; }};
    })};
    torch::optim::SGD sgd{model->parameters(), 0.001};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).to(torch::kFloat).sum();
      model.backward(loss);
      return loss;
    });
    auto note = [&] { seen.push_back(model->weight[0].item<float>()); };
    auto train = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        optimizer.zero_grad();
        train_step(torch::ones({1, 3}, torch::kBFloat16));
        optimizer.step();
      }
      note();
    };
    train(1); // 0.999: the next smaller number is 0.996
    train(9);
    auto state = model.state_dict();
    for (auto& [name, t] : state)
      t.fill_(2);
    model.load_state_dict(state);
    train(1);
    train(9);
  });
  REQUIRE(seen.size() == 4);
  CHECK(seen[0] == 1.0f);
  CHECK(seen[1] == Catch::Approx(0.99).margin(0.003));
  CHECK(seen[2] == 2.0f);
  CHECK(seen[3] == Catch::Approx(1.99).margin(0.006));
}

TEST_CASE("slices of tensor-parallel ranks have float32 weights of their own",
          "[runtime][precision][R56][tensor_parallel]") {
  auto shards = GENERATE(false, true);
  CAPTURE(shards);
  std::mutex mutex;
  auto train = [&](uint64_t tensor, bool half) {
    numbers result;
    virtual_world_options world;
    world.config.tensor_parallel_degree = tensor;
    world.config.ddp = true;
    world.config.bf16_params = half;
    world.config.shard_optimizer_state = tensor > 1 && shards;
    world.config.threads = 1;
    run_virtual_world(2, world, [&](session& s) {
      distributed_model model{seeded([] { return distributed_net{}; })};
      if (tensor > 1) {
        set_tensor_parallelism(*model->up);
        set_tensor_parallelism(*model->down);
      }
      auto inner = make_optimizer("sgd", model->parameters());
      distributed_optimizer optimizer{*inner};
      auto train_step = training_step(model);
      for (int64_t i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        train_step(data_of(2, i).chunk(2).at(dp_rank()));
        optimizer.step();
      }
      auto after = model.state_dict();
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        result = {after.begin(), after.end()};
    });
    return result;
  };
  auto expected = train(1, false);
  auto mine = train(2, true);
  REQUIRE(mine.size() == expected.size());
  for (auto& [name, x] : expected) {
    INFO(name);
    auto& y = mine.at(name);
    CHECK(y.scalar_type() == torch::kBFloat16);
    REQUIRE(y.sizes() == x.sizes());
    // Some digits of bfloat16.
    auto far = (y.to(torch::kFloat) - x).abs().max().item<double>();
    CHECK(far <= 0x1p-6 * x.abs().max().item<double>());
  }
}
