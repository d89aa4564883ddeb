#include "tests/support/catch.hpp"

#include "runtime/step/model_state.hpp"
#include "smp/nn.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <utility>

// What modules weigh, for the partition, of which each tensor-parallel rank
// computes a part.

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t peers = 4;

/// Two Linear of which one is shared.
torch::nn::Sequential net(int64_t width) {
  torch::nn::Sequential result;
  result->push_back("shared", torch::nn::Linear(width, 4 * width));
  result->push_back("whole", torch::nn::Linear(4 * width, width));
  return result;
}

/// Decisions from one trace.
struct decisions {
  module_info own[2], same[2], fast[2]; // shared, and not
  bool traced = true;
};

decisions decide(int64_t width, int64_t rows) {
  decisions result;
  virtual_world_options world;
  world.config.threads = 1;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([&] { return net(width); })};
    auto& state = model.state();
    state.trace(random_stream{1}, [&] { model(torch::ones({rows, width})); });
    auto keep = [&](module_info(&to)[2], const sharing_request& x) {
      auto found = state.decide(2, 0, x);
      result.traced = result.traced && found.traced
                      && found.sharing.shared.size() == 1;
      for (auto& m : found.model)
        if (m.path == "shared" || m.path == "whole")
          to[m.path == "whole"] = m;
    };
    keep(result.own, {{"shared"}, peers, true, false});
    keep(result.same, {{"shared"}, peers, true, true});
    keep(result.fast, {{"shared"}, peers, false, true});
  });
  return result;
}

} // namespace

TEST_CASE("where ranks have the same samples a shared module weighs a part",
          "[runtime][session][tensor_parallel]") {
  // Billions of operations: no time that is noise.
  auto x = decide(512, 512);
  REQUIRE(x.traced);
  // What ranks exchange counts besides, as backward is two thirds of a time. Of
  // its own samples each sends three quarters of the inputs there and of their
  // gradients back, and to each peer the results for its samples and the
  // gradients of its own; of the same ones the gradients of its channels, and
  // six quarters of the results.
  const double inputs = 512 * 512 * sizeof(float);
  const double outputs = 4 * inputs;
  const double rate = 5e9; // bytes per second
  const double exchange_own = (1.5 * inputs + 6 * outputs) / rate / 3;
  const double exchange_same = (0.75 * inputs + 1.5 * outputs) / rate / 3;
  auto alone = x.own[0].compute.value() - exchange_own;
  CHECK(alone > 0);
  // For the samples of all it is as much as alone for one's own.
  CHECK(x.same[0].compute.value()
        == Catch::Approx(alone / peers + exchange_same));
  CHECK(x.same[0].activations == Catch::Approx(x.own[0].activations / peers));
  CHECK(x.own[0].activations >= 4 * 512 * 512);
  CHECK(x.fast[0].compute == x.same[0].compute);
  CHECK(x.fast[0].activations == x.own[0].activations);
  for (auto& [a, b] :
       {std::pair{&x.same[1], &x.own[1]}, std::pair{&x.fast[1], &x.own[1]}}) {
    CHECK(a->compute == b->compute);
    CHECK(a->activations == b->activations);
  }
  CHECK(x.same[0].parameters.at(0).elements == uint64_t{4 * 512 * 512} / peers);
  // The first rank has all of a bias.
  CHECK(x.same[0].parameters.at(1).elements == uint64_t{4 * 512});
  CHECK(x.same[1].parameters.at(0).elements == uint64_t{4 * 512 * 512});
}

TEST_CASE("what each rank has as a whole of a shared layer weighs the whole",
          "[runtime][session][tensor_parallel]") {
  constexpr uint64_t channels = 16, inner = 24;
  auto saves_memory = GENERATE(false, true);
  CAPTURE(saves_memory);
  uint64_t found = 0;
  size_t shared = 0;
  virtual_world_options world;
  world.config.threads = 1;
  run_virtual_world(1, world, [&](session&) {
    nn::transformer_layer_arguments x;
    x.num_attention_heads = x.attention_head_size = 4;
    x.hidden_size = channels;
    x.intermediate_size = inner;
    torch::nn::Sequential layers;
    layers->push_back("layer", nn::distributed_transformer_layer(x));
    distributed_model model{layers};
    auto decision = model.state().decide(2, 0,
                                         {{"*"}, peers, saves_memory, false});
    shared = decision.sharing.shared.size();
    for (auto& m : decision.model)
      for (auto& p : m.parameters)
        found += p.elements;
  });
  REQUIRE(shared == 1);
  uint64_t weights = 4 * channels * channels + 2 * channels * inner;
  uint64_t norms = 4 * channels;
  // Biases of linears whose outputs are cut for speed, and of the others.
  uint64_t first = 3 * channels + inner, second = 2 * channels;
  CHECK(found
        == (saves_memory ? (weights + norms) / peers + first + second
                         : (weights + first) / peers + second + norms));
}

TEST_CASE("calls that take no time cost the same shared or not",
          "[runtime][session][tensor_parallel]") {
  auto x = decide(8, 1);
  REQUIRE(x.traced);
  CHECK(x.own[0].compute.value() > 0);
  CHECK(x.same[0].compute == x.own[0].compute);
}
