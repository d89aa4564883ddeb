#include "tests/support/catch.hpp"

#include "runtime/deferred/deferred_init.hpp"
#include "runtime/nn/layers.hpp"
#include "smp/nn.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

// What ranks share of a model whose parameters are made at the partition begins
// with the values that one process has.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 64;

nn::transformer_layer_arguments layer_arguments() {
  nn::transformer_layer_arguments x;
  x.num_attention_heads = 4;
  x.attention_head_size = width / 4;
  x.hidden_size = width;
  x.intermediate_size = 2 * width;
  return x;
}

/// All but biases and the norms of the layer have more than 4 KB.
struct large_impl : torch::nn::Module {
  large_impl() {
    register_module("table", table);
    register_module("up", up);
    register_module("down", down);
    register_module("norm", norm);
    register_module("layer", layer);
  }

  submodule<torch::nn::Embedding> table{40, width};
  submodule<torch::nn::Linear> up{width, 2 * width};
  submodule<conv1d> down{2 * width, width, 0.1};
  submodule<torch::nn::LayerNorm> norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{1152})};
  submodule<nn::distributed_transformer_layer> layer{layer_arguments()};
};
TORCH_MODULE_IMPL(large, large_impl);

} // namespace

TEST_CASE("deferred modules that ranks share have the values of one process",
          "[runtime][tensor_parallel]") {
  auto tensor = GENERATE(int64_t{2}, int64_t{4});
  auto pipeline = GENERATE(uint64_t{1}, uint64_t{2});
  auto optimize = GENERATE(std::string{"memory"}, std::string{"speed"});
  CAPTURE(tensor, pipeline, optimize);
  numbers expected;
  for (auto& p : seeded([] { return large{}; })->named_parameters())
    expected.emplace(p.key(), p.value().detach());
  virtual_world_options world;
  world.reorder = true;
  auto& config = world.config;
  config.tensor_parallel_degree = static_cast<uint64_t>(tensor);
  config.pipeline_parallel_degree = pipeline;
  config.tensor_parallel_modules = {"*", "norm"};
  config.optimize = optimize;
  config.ddp = true;
  config.threads = 1;
  auto ranks = config.tensor_parallel_degree * pipeline;
  run_virtual_world(ranks, world, [&](session&) {
    auto made = seeded([] {
      delay_param_initialization deferring;
      return large{};
    });
    int deferred = 0;
    for (auto& x : made->parameters())
      deferred += is_deferred(x);
    distributed_model model{made};
    model.partition();
    auto state = model.state_dict();
    auto mine = model.local_named_parameters();
    assertion_lock held;
    CHECK(deferred == 5 + 6); // six weights in the layer
    CHECK(state.size() == expected.size());
    for (auto& [name, x] : state) {
      INFO(name);
      CHECK(torch::equal(x, expected.at(name)));
    }
    for (auto& [name, x] : mine)
      if (name == "table.weight" || name == "up.weight"
          || name == "norm.weight") {
        INFO(name);
        auto sizes = expected.at(name).sizes().vec();
        sizes.back() /= tensor;
        CHECK(x.sizes() == at::IntArrayRef{sizes});
      }
  });
}
