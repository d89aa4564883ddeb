#pragma once

// Ranks that train with averages of their weights.

#include "runtime/session/placement.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <cstdint>

namespace smp::test {

constexpr uint64_t averaged_ranks = 4; // two replicas of two

struct averaged_job {
  bool shards = false;
  bool half = false;
  bool offloads = false;
};

/// Calls `f` on each rank with the session, the model, its optimizer and what
/// makes a step.
template <class Inner, class F>
void run_averaged_ranks(const averaged_job& x, double learning_rate, F f) {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.ddp = true;
  world.config.shard_optimizer_state = x.shards;
  world.config.bf16_params = x.half;
  world.config.offload_optimizer = x.offloads;
  world.config.threads = 1;
  run_virtual_world(averaged_ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return two_layers{}; })};
    place_in_turn(model);
    Inner inner{model->parameters(), learning_rate};
    distributed_optimizer optimizer{inner, {.ema_decay = 0.75}};
    auto train_step = step([&](Tensor data) {
      auto loss = model(data).to(torch::kFloat).square().mean();
      model.backward(loss);
      return loss;
    });
    f(s, model, optimizer, [&](int64_t i) {
      optimizer.zero_grad();
      auto data = torch::sin(torch::arange(32).view({8, 4}) * 0.3 + i);
      train_step(data.to(x.half ? torch::kBFloat16 : torch::kFloat)
                   .chunk(static_cast<int64_t>(dp_size()))
                   .at(dp_rank()));
      optimizer.step();
    });
  });
}

} // namespace smp::test
