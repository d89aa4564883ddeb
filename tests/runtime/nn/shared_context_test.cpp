#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <torch/utils.h>

#include <cstdint>
#include <string>

// What all layers of a decoder attend to reaches peers once, however many
// layers there are.

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
