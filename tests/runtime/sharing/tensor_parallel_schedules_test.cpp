// ctest: seconds=78 label=proof
#include "tests/support/catch.hpp"

#include "runtime/nn/layers.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <mutex>
#include <string>

// Peers reach what they share with different microbatches first, and what they
// send each other comes late: 500 orders in which messages arrive.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 16, tokens = 4, peers = 2, microbatches = 4;
constexpr uint64_t ranks = 4;

gpt make_gpt() {
  model_sizes x;
  x.vocabulary = words;
  x.sequence_length = tokens;
  x.layers = 2;
  x.heads = 2;
  x.width = 8;
  return gpt{x};
}

/// [peers * microbatches, tokens]
Tensor samples() {
  auto rows = peers * microbatches;
  return (torch::arange(rows * tokens).view({rows, tokens}) * 7 + 3) % words;
}

numbers alone() {
  auto model = seeded(make_gpt);
  auto parts = samples().chunk(peers * microbatches);
  for (auto& x : parts)
    (token_loss(model->forward(x), x) / static_cast<double>(parts.size()))
      .backward();
  numbers result;
  for (auto& p : model->named_parameters())
    result.emplace(p.key(), p.value().grad());
  return result;
}

virtual_world_options world_of(uint64_t seed) {
  virtual_world_options result;
  result.reorder = true;
  result.seed = seed;
  auto& x = result.config;
  x.pipeline_parallel_degree = ranks / peers;
  x.tensor_parallel_degree = peers;
  x.tensor_parallel_modules = {"*", "transformer.ln_f"};
  x.optimize = seed % 2 == 0 ? "speed" : "memory";
  x.fast_mode = seed % 4 < 2;
  x.ddp = true;
  x.microbatches = microbatches;
  x.pipeline = "interleaved";
  x.trace_device = "none";
  x.threads = 1;
  return result;
}

struct training {
  int steps = 1;
  double rate = 0;
  bool replays = false;
};

/// @returns the gradients of the last step; of rank 0, all have the same
numbers gradients_of(const virtual_world_options& world,
                     const training& how = {}) {
  numbers result;
  std::mutex mutex;
  uint64_t requests = 0;
  uint64_t replayed = 0;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded(make_gpt)};
    torch::optim::SGD sgd{model->parameters(), how.rate};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = token_loss(model(x), x);
      model.backward(loss);
      return loss.detach();
    });
    for (int i = 0; i < how.steps; ++i) {
      optimizer.zero_grad();
      train_step(samples().chunk(peers).at(dp_rank()));
      optimizer.step();
    }
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    replayed += s.last_step().replayed;
    requests += s.last_step().requests;
    if (s.rank() == 0)
      result = {gradients.begin(), gradients.end()};
  });
  CHECK(replayed == (how.replays ? ranks : 0));
  CHECK(requests > 0); // both ranks of a pipeline have a part
  return result;
}

} // namespace

TEST_CASE("shared modules give the same numbers in 500 orders of messages",
          "[runtime][tensor_parallel][R35][R43]") {
  auto expected = alone();
  for (uint64_t seed = 0; seed < 500; ++seed) {
    INFO("seed " << seed);
    check_near(gradients_of(world_of(seed)), expected);
  }
}

TEST_CASE("shared modules give the same bits in 100 orders of messages",
          "[runtime][tensor_parallel][deterministic][R33]") {
  numbers first[4]; // of each mode
  for (uint64_t seed = 0; seed < 100; ++seed) {
    INFO("seed " << seed);
    auto world = world_of(seed);
    world.config.deterministic_server = true;
    // The first steps learn the order.
    auto mine = gradients_of(world, {.steps = 6, .rate = 0.1, .replays = true});
    auto& expected = first[seed % 4];
    if (expected.empty())
      expected = mine;
    REQUIRE(mine.size() == expected.size());
    for (auto& [name, x] : mine) {
      INFO(name);
      CHECK(torch::equal(x, expected.at(name)));
    }
  }
}

// Each pipeline by itself would replay the step that was its fastest.
TEST_CASE(
  "pipelines that share modules replay the same step in 20 orders of "
  "messages",
  "[runtime][tensor_parallel][static][R33]") {
  auto expected = alone();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    INFO("seed " << seed);
    auto world = world_of(seed);
    world.config.static_mode = true;
    check_near(gradients_of(world, {.steps = 12, .replays = true}), expected);
  }
}
