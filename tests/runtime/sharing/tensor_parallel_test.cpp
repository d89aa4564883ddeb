#include "tests/support/catch.hpp"

#include "runtime/train/models/gpt.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// Modules that tensor-parallel ranks share, in every grid with pipelines and
// replicas (docs/tensor_parallel.md).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t words = 40;
constexpr int64_t width = 8;
constexpr uint64_t microbatches = 2;

/// Shared modules as members, in a Sequential, used twice, with and without a
/// bias; and others between.
template <template <class> class P>
struct mixed_impl : torch::nn::Module {
  mixed_impl() {
    register_module("table", table);
    register_module("up", up);
    register_module("down", down);
    register_module("norm", norm);
    register_module("tail", tail);
    register_module("odd", odd);
    register_module("scores", scores);
  }

  Tensor forward(Tensor x) {
    auto h = table(x);
    h = h + down(torch::relu(up(h)));
    h = norm(h);
    h = h + down(torch::tanh(up(h))); // once more
    return (tail->forward(h).squeeze(-1) + odd(h.mean(-1))
            + scores(x).squeeze(-1))
      .square()
      .mean();
  }

  P<torch::nn::Embedding> table{words, width};
  P<torch::nn::Linear> up{width, 4 * width},
    down{torch::nn::LinearOptions(4 * width, width).bias(false)};
  P<torch::nn::LayerNorm> norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  torch::nn::Sequential tail{torch::nn::Linear(width, width),
                             torch::nn::Linear(width, 1)};
  P<torch::nn::Linear> odd{3, 3};           // 3 channels
  P<torch::nn::Embedding> scores{words, 1}; // 1
};

struct shared_model_impl : mixed_impl<submodule> {};
TORCH_MODULE_IMPL(shared_model, shared_model_impl);

struct grid {
  uint64_t tensor = 2;
  uint64_t pipeline = 1;
  uint64_t rest = 1;
  std::string placement = "cluster";

  uint64_t replicas() const {
    return tensor * rest;
  }

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = pipeline;
    x.tensor_parallel_degree = tensor;
    x.tensor_parallel_modules = {"*", "norm"};
    x.placement_strategy = placement;
    x.ddp = true;
    x.microbatches = microbatches;
    x.threads = 1;
    return x;
  }
};

/// [4 * replicas, 3], of each step.
Tensor data_of(const grid& x, int64_t step) {
  auto rows = static_cast<int64_t>(4 * x.replicas());
  return (torch::arange(rows * 3).view({rows, 3}) * 7 + step) % words;
}

struct training {
  std::vector<numbers> gradients;
  numbers state;
  double norm = 0;
};

training train_alone(const grid& x, int64_t steps) {
  auto model = seeded([] { return mixed_impl<as_is>{}; });
  torch::optim::AdamW optimizer{model.parameters(), 0.01};
  training result;
  for (int64_t i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    auto parts = data_of(x, i).chunk(
      static_cast<int64_t>(x.replicas() * microbatches));
    for (auto& part : parts)
      (model.forward(part) / static_cast<double>(parts.size())).backward();
    auto& gradients = result.gradients.emplace_back();
    double squares = 0;
    for (auto& p : model.named_parameters()) {
      gradients.emplace(p.key(), p.value().grad().clone());
      squares += p.value().grad().square().sum().item<double>();
    }
    result.norm = std::sqrt(squares);
    optimizer.step();
  }
  for (auto& p : model.named_parameters())
    result.state.emplace(p.key(), p.value().detach().clone());
  return result;
}

/// What every rank has is the same, so only rank 0's is kept; the others say
/// what of theirs is not.
struct shared_training : training {
  std::string text;
  std::vector<std::string> different;
  std::vector<int64_t> held; // by rank: numbers in its parameters
};

shared_training train_shared(const grid& x, int64_t steps,
                             session_config config) {
  shared_training result;
  result.held.resize(x.replicas() * x.pipeline);
  std::mutex mutex;
  virtual_world_options world;
  world.config = std::move(config);
  world.reorder = true;
  run_virtual_world(result.held.size(), world, [&](session& s) {
    distributed_model model{seeded([] { return shared_model{}; })};
    torch::optim::AdamW adam{model->parameters(), 0.01};
    distributed_optimizer optimizer{adam};
    auto train_step = training_step(model);
    training mine;
    for (int64_t i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      train_step(
        data_of(x, i).chunk(static_cast<int64_t>(x.replicas())).at(dp_rank()));
      auto gradients = model.gradients();
      mine.gradients.emplace_back(gradients.begin(), gradients.end());
      mine.norm = clip_grad_norm_(model, 1e9);
      optimizer.step();
    }
    auto state = model.state_dict();
    mine.state = {state.begin(), state.end()};
    std::unique_lock guard{mutex};
    for (auto& p : model.local_parameters())
      result.held[s.rank()] += p.numel();
    if (s.rank() == 0) {
      static_cast<training&>(result) = mine;
      result.text = model.partition_text();
    }
    guard.unlock();
    barrier();
    guard.lock();
    for (auto& [name, t] : mine.state)
      if (!torch::equal(result.state.at(name), t))
        result.different.push_back(name);
    for (size_t i = 0; i < mine.gradients.size(); ++i)
      for (auto& [name, t] : mine.gradients[i])
        if (!torch::equal(result.gradients[i].at(name), t))
          result.different.push_back(name);
    if (mine.norm != result.norm)
      result.different.push_back("norm");
  });
  return result;
}

void check_same(const grid& x, const session_config& config, int64_t steps) {
  auto expected = train_alone(x, steps);
  auto mine = train_shared(x, steps, config);
  CHECK(mine.different == std::vector<std::string>{});
  REQUIRE(mine.gradients.size() == expected.gradients.size());
  check_near(mine.gradients[0], expected.gradients[0]);
  // Later steps begin where rounding made small differences.
  for (size_t i = 1; i < expected.gradients.size(); ++i)
    check_near(mine.gradients[i], expected.gradients[i], {.share = 2e-3});
  check_near(mine.state, expected.state, {.share = 2e-3});
  CHECK(mine.norm == Catch::Approx(expected.norm).epsilon(1e-3));
}

} // namespace

TEST_CASE("shared modules compute what one process does, in every grid",
          "[runtime][tensor_parallel][R50]") {
  auto x = GENERATE(
    grid{2, 1, 1}, grid{4, 1, 1}, grid{2, 2, 1}, grid{2, 1, 2}, grid{2, 2, 2},
    grid{2, 2, 1, "spread"}, grid{2, 2, 2, "spread"}, grid{2, 2, 2, "TDP"},
    grid{2, 2, 2, "DTP"}, grid{2, 2, 2, "PDT"}, grid{2, 2, 2, "PTD"});
  CAPTURE(x.tensor, x.pipeline, x.rest, x.placement);
  check_same(x, x.config(), 3);
}

TEST_CASE("shared modules do the same in every mode",
          "[runtime][tensor_parallel]") {
  grid x{2, 2, 1};
  auto config = x.config();
  SECTION("waiting") {
    config.fast_mode = false;
  }
  SECTION("promises") {
    config.fast_mode = true;
  }
  SECTION("a fixed order") {
    config.deterministic_server = true;
  }
  SECTION("static") {
    config.static_mode = true;
    config.static_steps = 1;
  }
  SECTION("one after the other") {
    config.pipeline = "simple";
  }
  SECTION("1f1b") {
    config.pipeline = "1f1b";
  }
  check_same(x, config, 6);
}

namespace {

/// Only biases train; of the first linear not even the input requires grad.
template <template <class> class P>
struct biased_impl : torch::nn::Module {
  biased_impl() {
    register_module("up", up);
    register_module("down", down);
    up->weight.requires_grad_(false);
    down->weight.requires_grad_(false);
  }

  Tensor forward(Tensor x) {
    return down(up(x)).square().mean();
  }

  P<torch::nn::Linear> up{width, 4 * width}, down{4 * width, width};
};

struct biased_model_impl : biased_impl<submodule> {};
TORCH_MODULE_IMPL(biased_model, biased_model_impl);

} // namespace

TEST_CASE("biases alone are trained in shared linears with frozen weights",
          "[runtime][tensor_parallel][R50]") {
  auto tensor = GENERATE(2u, 4u);
  grid x{.tensor = tensor};
  CAPTURE(tensor);
  auto batch = torch::linspace(-1, 1, 8 * width).view({8, width});
  auto plain_model = seeded([] { return biased_impl<as_is>{}; });
  plain_model.forward(batch).backward();
  numbers expected{{"up.bias", plain_model.up->bias.grad()},
                   {"down.bias", plain_model.down->bias.grad()}};
  virtual_world_options world;
  world.config = x.config();
  world.config.tensor_parallel_modules = {"*"};
  run_virtual_world(tensor, world, [&](session&) {
    distributed_model model{seeded([] { return biased_model{}; })};
    auto train_step = training_step(model);
    train_step(batch.chunk(tensor).at(dp_rank()));
    auto gradients = model.gradients();
    assertion_lock held;
    check_near({gradients.begin(), gradients.end()}, expected);
  });
}

TEST_CASE("a rank holds its slice of what is shared, and the print says which",
          "[runtime][tensor_parallel]") {
  grid x{4, 1, 1};
  auto mine = train_shared(x, 1, x.config());
  // All are cut in four but odd.
  constexpr int64_t cut = words * width + 4 * width * width + 4 * width * width
                          + width * width + width + 2 * width + words;
  constexpr int64_t biases = 4 * width + width + 1; // on the first peer
  constexpr int64_t whole = 3 * 3 + 3;
  CHECK(mine.held
        == std::vector<int64_t>{cut / 4 + biases + whole, cut / 4 + whole,
                                cut / 4 + whole, cut / 4 + whole});
  CHECK_THAT(mine.text,
             ContainsSubstring("\nEmbedding shared by 4 ranks: table\n")
               && ContainsSubstring("\nLinear shared by 4 ranks: up, down, "
                                    "tail.0 and 1 more\n")
               && ContainsSubstring("\nLayerNorm shared by 4 ranks: norm\n")
               && ContainsSubstring("\nEmbedding shared by 4 ranks by rows: "
                                    "scores\n")
               && ContainsSubstring("\nLinear not shared, as its 3 input "
                                    "channels cannot be divided among 4 "
                                    "ranks; 4 could: odd\n"));
}

TEST_CASE("a layer norm is shared only where it is named itself",
          "[runtime][tensor_parallel]") {
  grid x{2, 1, 1};
  auto config = x.config();
  config.tensor_parallel_modules = {"*"};
  auto mine = train_shared(x, 1, config);
  CHECK_THAT(mine.text,
             ContainsSubstring("LayerNorm not shared, as little of it could be "
                               "held by others; name it by its whole path: "
                               "norm\n"));
  CHECK_THAT(mine.text, ContainsSubstring("Linear shared"));
}

TEST_CASE("code says which modules are shared", "[runtime][tensor_parallel]") {
  grid x{2, 1, 1};
  virtual_world_options world;
  world.config = x.config();
  world.config.tensor_parallel_modules = {"tail"};
  std::string text;
  run_virtual_world(2, world, [&](session& s) {
    auto made = seeded([] {
      tensor_parallelism_scope share;
      return shared_model{};
    });
    set_tensor_parallelism(*made->up, false);
    set_tensor_parallelism(*made->tail[0], false);
    distributed_model model{made};
    model.partition();
    if (s.rank() == 0)
      text = model.partition_text();
  });
  CHECK_THAT(text, ContainsSubstring("\nEmbedding shared by 2 ranks: table\n")
                     && ContainsSubstring("\nLinear shared by 2 ranks: down, "
                                          "tail.1\n"));
}

TEST_CASE("a pattern that fits nothing is an error on all ranks",
          "[runtime][tensor_parallel]") {
  grid x{2, 1, 1};
  virtual_world_options world;
  world.config = x.config();
  world.config.tensor_parallel_modules = {"up", "encoder.*"};
  std::mutex mutex;
  std::vector<std::string> told;
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{seeded([] { return shared_model{}; })};
    try {
      model.partition();
    } catch (const error& e) {
      std::unique_lock guard{mutex};
      told.push_back(e.what());
    }
  });
  REQUIRE(told.size() == 2);
  for (auto& x : told)
    CHECK_THAT(x, ContainsSubstring("tensor_parallel.modules: no module is "
                                    "called \"encoder.*\""));
}

namespace {

/// Loads other numbers into a model that ranks share.
struct loaded {
  std::string text;
  std::vector<std::string> names;
  std::vector<std::string> wrong; // what is not what was loaded
};

template <class M>
loaded load_into(uint64_t ranks, const session_config& config, M make) {
  virtual_world_options world;
  world.config = config;
  std::mutex mutex;
  loaded result;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded(make)};
    model.partition();
    named_tensors given;
    for (auto& [name, t] : model.state_dict())
      given.emplace_back(name, torch::sin(torch::arange(t.numel()) + 1.0)
                                 .to(t.scalar_type())
                                 .view(t.sizes()));
    model.load_state_dict(given);
    std::map<std::string, Tensor> expected{given.begin(), given.end()};
    auto found = model.state_dict();
    std::unique_lock guard{mutex};
    for (auto& [name, t] : found)
      if (!torch::equal(t, expected.at(name)))
        result.wrong.push_back(name);
    if (s.rank() != 0)
      return;
    result.text = model.partition_text();
    for (auto& [name, t] : found)
      result.names.push_back(name);
  });
  return result;
}

} // namespace

TEST_CASE("a state dict of the whole model is loaded in slices",
          "[runtime][tensor_parallel][state]") {
  auto x = load_into(4, grid{2, 2, 1}.config(), [] { return shared_model{}; });
  CHECK(x.wrong == std::vector<std::string>{});
  CHECK(std::ranges::find(x.names, "up.weight") != x.names.end());
}

TEST_CASE(
  "a state dict of layers that are shared as a whole, and of the last "
  "layer, is loaded in slices",
  "[runtime][tensor_parallel][state]") {
  auto tied = GENERATE(false, true);
  auto config = grid{2, 2, 1}.config();
  config.optimize = GENERATE("memory", "speed");
  config.tensor_parallel_modules = {"transformer.h.*", "lm_head"};
  if (tied)
    config.tensor_parallel_modules.push_back("transformer.wte");
  CAPTURE(tied, config.optimize);
  auto x = load_into(4, config, [&] {
    model_sizes sizes;
    sizes.vocabulary = 41; // the first rank has one more
    sizes.sequence_length = 6;
    sizes.layers = 2;
    sizes.width = width;
    sizes.tied = tied;
    sizes.loss_in_head = true;
    return gpt{sizes};
  });
  CHECK(x.wrong == std::vector<std::string>{});
  for (auto& what :
       {"TransformerLayer shared by 2 ranks for " + config.optimize,
        std::string{"LMHead shared by 2 ranks by words"}})
    CHECK_THAT(x.text, ContainsSubstring(what));
  // Query, key and value of all heads, one behind the other.
  CHECK(std::ranges::find(x.names, "transformer.h.1.attn.c_attn.weight")
        != x.names.end());
}

TEST_CASE(
  "a step that fails in one pipeline fails in those that share modules "
  "with it",
  "[runtime][tensor_parallel][R6][R50]") {
  grid x{2, 2, 1};
  virtual_world_options world;
  world.config = x.config();
  std::mutex mutex;
  std::vector<failure> failures;
  std::vector<double> losses;
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{seeded([] { return shared_model{}; })};
    auto bad = false;
    auto train_step = step([&](Tensor y) {
      if (bad && tp_rank() == 1)
        throw std::runtime_error{"no more data"};
      auto loss = model(y);
      model.backward(loss);
      return loss;
    });
    auto y = data_of(x, 0).chunk(2).at(dp_rank());
    auto first = train_step(y).reduce_mean().item<double>();
    bad = true;
    try {
      train_step(y);
    } catch (const error& e) {
      std::unique_lock guard{mutex};
      failures.push_back(e.cause());
    }
    bad = false;
    auto again = train_step(y).reduce_mean().item<double>();
    std::unique_lock guard{mutex};
    if (s.pp_rank() == 0)
      losses.push_back(again - first);
  });
  REQUIRE(failures.size() == 4);
  for (auto& x : failures) {
    INFO(x.describe());
    CHECK(x.code == error_code::user_code);
    CHECK_THAT(x.text, ContainsSubstring("no more data"));
  }
  CHECK(losses == std::vector<double>{0, 0});
}

TEST_CASE("a part of a layer that ranks share as a whole is not called alone",
          "[runtime][tensor_parallel]") {
  virtual_world_options world;
  world.config = grid{2, 1, 1}.config();
  world.config.tensor_parallel_modules = {"transformer.h.*"};
  std::mutex mutex;
  std::vector<std::string> told;
  std::string text;
  run_virtual_world(2, world, [&](session& s) {
    model_sizes sizes;
    sizes.width = width;
    distributed_model model{seeded([&] { return gpt{sizes}; })};
    auto train_step = step([&](Tensor y) {
      auto block = model->transformer->h->ptr(0);
      auto h = torch::zeros({y.size(0), y.size(1), width});
      return dynamic_cast<gpt_block_impl&>(*block).attn(h).sum();
    });
    try {
      train_step(torch::zeros({2, 3}, torch::kLong));
    } catch (const error& e) {
      std::unique_lock guard{mutex};
      told.push_back(e.what());
    }
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      text = model.partition_text();
  });
  CHECK_THAT(text, ContainsSubstring("TransformerLayer shared by 2 ranks for "
                                     "memory: transformer.h.0, "));
  REQUIRE(told.size() == 2);
  for (auto& x : told)
    CHECK_THAT(x,
               ContainsSubstring("'transformer.h.0.attn' was called, but "
                                 "ranks share 'transformer.h.0' as a whole"));
}
