#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

// What layers behind each other exchange once: what they attend to, and hidden
// states that nobody sees.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t rows = 4; // of two ranks
constexpr int64_t width = 64;

/// @returns what rank 0 sends in a step
double sent_with(int64_t layers, int64_t seen, bool again) {
  nn::transformer_lm_head_arguments sizes;
  sizes.num_attention_heads = 2;
  sizes.attention_head_size = width / 2;
  sizes.hidden_size = sizes.intermediate_size = width;
  sizes.num_layers = layers;
  sizes.vocab_size = 32;
  sizes.num_positions = 4;
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0;
  sizes.add_cross_attention = true;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.optimize = "speed"; // linears of a context send nothing
  world.config.ddp = true;
  world.config.microbatches = 1;
  world.config.threads = 1;
  if (again) {
    auto& how = world.config.activation_checkpointing;
    how.modules = {"transformer.seq_layers"};
    how.strategy = "contiguous";
  }
  double result = 0;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{
      seeded([&] { return nn::distributed_transformer_lm_head{sizes}; })};
    auto train_step = step([&](Tensor text, Tensor context) {
      auto mask = torch::ones_like(text);
      auto leaf = context.detach().clone().requires_grad_();
      auto loss = model->loss(text, text, mask, mask, leaf.sin());
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({rows / 2, 4}, torch::kLong),
               torch::ones({rows / 2, seen, width}));
    if (s.rank() == 0)
      result = static_cast<double>(s.last_step().bytes_sent);
  });
  return result;
}

} // namespace

TEST_CASE("a context reaches peers once for all layers of a decoder",
          "[runtime][nn][R50]") {
  auto again = GENERATE(false, true);
  auto layers = GENERATE(1, 3);
  CAPTURE(again, layers);
  constexpr int64_t few = 8, many = 264;
  auto grown = sent_with(layers, many, again) - sent_with(layers, few, again);
  // float32 to the other rank, and gradients back; what is computed again
  // travels again.
  auto once = 4.0 * (rows / 2) * (many - few) * width;
  CHECK(grown == Catch::Approx((again ? 3 : 2) * once).epsilon(0.05));
}

namespace {

/// The layers of a distributed_transformer, called by the code of a user.
struct own_layers_impl : torch::nn::Module {
  explicit own_layers_impl(const nn::transformer_arguments& x) {
    for (int64_t i = 0; i < x.num_layers; ++i)
      seq_layers->push_back(nn::distributed_transformer_layer(x));
    register_module("seq_layers", seq_layers);
  }

  nn::layer_states forward(nn::layer_states x) {
    return seq_layers->forward<nn::layer_states>(std::move(x));
  }

  torch::nn::Sequential seq_layers;
};
TORCH_MODULE_IMPL(own_layers, own_layers_impl);

template <class Layers>
struct tower_impl : torch::nn::Module {
  explicit tower_impl(const nn::transformer_arguments& x) : layers(x) {
    register_module("layers", layers);
  }

  Tensor forward(Tensor x) {
    return layers->forward(nn::layer_states{x}).at(0);
  }

  Layers layers;
};

struct own_tower_impl : tower_impl<own_layers> {
  using tower_impl<own_layers>::tower_impl;
};
TORCH_MODULE_IMPL(own_tower, own_tower_impl);

struct smp_tower_impl : tower_impl<nn::distributed_transformer> {
  using tower_impl<nn::distributed_transformer>::tower_impl;
};
TORCH_MODULE_IMPL(smp_tower, smp_tower_impl);

constexpr int64_t tower_layers = 3, tower_tokens = 64;

struct tower_step {
  double sent = 0; // by rank 0
  std::map<std::string, Tensor> gradients;
};

template <class Tower>
tower_step step_of() {
  nn::transformer_arguments sizes;
  sizes.num_layers = tower_layers;
  sizes.num_attention_heads = 2;
  sizes.attention_head_size = width / 2;
  sizes.hidden_size = sizes.intermediate_size = width;
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.optimize = "memory";
  world.config.ddp = true;
  world.config.microbatches = 1;
  world.config.threads = 1;
  tower_step result;
  std::mutex mutex;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] { return Tower{sizes}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).square().mean();
      model.backward(loss);
      return loss;
    });
    auto x = torch::linspace(-1, 1, rows * tower_tokens * width)
               .view({rows, tower_tokens, width})
               .sin();
    train_step(x.chunk(2).at(dp_rank()));
    auto sent = static_cast<double>(s.last_step().bytes_sent);
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = {sent, {gradients.begin(), gradients.end()}};
  });
  return result;
}

} // namespace

TEST_CASE("the layers of a transformer hand hidden states to each other",
          "[runtime][nn]") {
  auto mine = step_of<smp_tower>(), own = step_of<own_tower>();
  REQUIRE(mine.gradients.size() == own.gradients.size());
  for (auto& [name, x] : own.gradients) {
    INFO(name);
    CHECK(torch::allclose(mine.gradients.at(name), x, 1e-4, 1e-7));
  }
  // Half of what a rank has, three times between two layers.
  auto states = 4.0 * (rows / 2) * tower_tokens * width;
  CHECK(own.sent - mine.sent
        == Catch::Approx((tower_layers - 1) * 3 * states / 2).epsilon(0.05));
}
