#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/utils.h>

#include <cmath>
#include <mutex>
#include <string>

// Modules of torch::nn that ranks share automatically.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 24;
constexpr int64_t words = 37;

} // namespace

TEST_CASE("submodules that are distributed are shared without being told",
          "[runtime][nn]") {
  struct net_impl : torch::nn::Module {
    net_impl() {
      register_module("table", table);
      register_module("norm", norm);
      register_module("out", out);
      register_module("own", own);
    }

    Tensor forward(Tensor x) {
      return own(out(norm(table(x)))).square().mean();
    }

    nn::distributed_embedding table{
      nn::embedding_arguments{.num_embeddings = words,
                              .embedding_dim = width,
                              .padding_idx = 3,
                              .scale_grad_by_freq = true,
                              .initializer_range = 0.5}};
    nn::distributed_layer_norm norm{
      torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
    nn::distributed_linear out{width, 6};
    submodule<torch::nn::Linear> own{6, 4};
  };
  numbers results[2];
  std::string text;
  for (uint64_t tensor : {1, 2}) {
    virtual_world_options world;
    world.config.tensor_parallel_degree = tensor;
    world.config.ddp = true;
    world.config.threads = 1;
    std::mutex mutex;
    run_virtual_world(2, world, [&](session& s) {
      distributed_model model{
        seeded([] { return torch::nn::ModuleHolder<net_impl>{}; })};
      auto train_step = training_step(model);
      auto tokens = torch::arange(8).add(10 * dp_rank());
      train_step(torch::cat({tokens, tokens.slice(0, 0, 4)}).view({3, 4}));
      auto gradients = model.gradients();
      std::unique_lock guard{mutex};
      if (s.rank() == 0) {
        results[tensor - 1] = {gradients.begin(), gradients.end()};
        text = model.partition_text();
      }
    });
  }
  check_near(results[1], results[0]);
  for (auto* what : {"Embedding shared by 2 ranks", "LayerNorm shared by 2",
                     "Linear shared by 2 ranks"})
    CHECK_THAT(text, ContainsSubstring(what));
  CHECK_THAT(text, !ContainsSubstring("own"
                                      ": "));
}

TEST_CASE("an embedding begins as its arguments say", "[runtime][nn]") {
  torch::manual_seed(3);
  nn::embedding_arguments x{.num_embeddings = 1000, .embedding_dim = 64};
  auto deviation = [&] {
    return nn::distributed_embedding {
      x
      } -> weight.std().item<double>();
  };
  CHECK(std::abs(deviation() - 0.02) < 1e-3);
  x.initializer_range = 0.5;
  CHECK(std::abs(deviation() - 0.5) < 1e-2);
  x.padding_idx = 7;
  x.max_norm = 2;
  nn::distributed_embedding table{x};
  CHECK(table->weight[7].abs().max().item<double>() == 0);
  CHECK(table->options.max_norm() == 2);
  x.padding_idx = 1000;
  CHECK_THAT(
    error_of([&] { nn::distributed_embedding{x}; }, error_code::config),
    ContainsSubstring("embedding_arguments: padding_idx = 1000; "
                      "allowed: a row of the table"));
}
