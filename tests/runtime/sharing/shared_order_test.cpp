#include "tests/support/catch.hpp"

#include "tests/support/torch/near.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <vector>

// Ranks that share modules and have no pipeline: a microbatch that waits for
// its peers is overtaken, but not where that would show in a state (R19).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 4;
constexpr int64_t peers = 2;
constexpr int64_t microbatches = 4;
constexpr int64_t steps = 3;

/// A batch norm of each rank between modules that ranks share. A microbatch of
/// large numbers passes it twice.
template <template <class> class P>
struct normed_impl : torch::nn::Module {
  normed_impl() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
  }

  Tensor forward(Tensor x) {
    auto y = out(norm(in(x)));
    if (x.max().item<double>() > 100)
      y = out(norm(y));
    return y.square().mean();
  }

  P<torch::nn::Linear> in{width, width}, out{width, width};
  P<torch::nn::BatchNorm1d> norm{width};
};

struct shared_norm_impl : normed_impl<submodule> {};
TORCH_MODULE_IMPL(shared_norm, shared_norm_impl);

/// [peers * microbatches * 4, width]. Microbatches differ, so that their order
/// shows in the running mean.
Tensor batch(int64_t step, bool often) {
  constexpr auto rows = peers * microbatches * 4;
  auto x = torch::arange(rows * width).remainder(11).view({rows, width})
           * torch::arange(1.0, rows + 1.0).view({rows, 1}) / rows;
  if (often && step == steps - 1)
    for (auto& mine : x.chunk(peers)) // the first microbatch of each rank
      mine.chunk(microbatches)[0].add_(200);
  return x;
}

/// @returns the running mean after the last step, by dp_rank
std::vector<Tensor> expected_means(bool often) {
  std::vector<Tensor> result;
  for (int64_t rank = 0; rank < peers; ++rank) {
    auto model = seeded([] { return normed_impl<as_is>{}; });
    for (int64_t i = 0; i < steps; ++i)
      for (auto& x : batch(i, often).chunk(peers)[rank].chunk(microbatches))
        model.forward(x);
    result.push_back(model.norm->running_mean.clone());
  }
  return result;
}

std::vector<Tensor> shared_means(uint64_t seed, bool often) {
  std::vector<Tensor> result(peers);
  virtual_world_options world;
  world.reorder = true;
  world.seed = seed;
  auto& x = world.config;
  x.tensor_parallel_degree = peers;
  x.tensor_parallel_modules = {"in", "out"};
  x.ddp = true;
  x.microbatches = microbatches;
  x.threads = 1;
  run_virtual_world(peers, world, [&](session& s) {
    distributed_model model{seeded([] { return shared_norm{}; })};
    auto train_step = training_step(model);
    for (int64_t i = 0; i < steps; ++i)
      train_step(batch(i, often).chunk(peers).at(dp_rank()));
    result[s.rank()] = model->norm->running_mean.clone();
  });
  return result;
}

void check_means(bool often) {
  auto expected = expected_means(often);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    INFO("seed " << seed);
    auto mine = shared_means(seed, often);
    for (size_t rank = 0; rank < expected.size(); ++rank)
      check_near(mine[rank], expected[rank], 1e-4);
  }
}

} // namespace

TEST_CASE("a batch norm between shared modules sees microbatches in order",
          "[runtime][tensor_parallel][R19]") {
  check_means(false);
}

// The later steps expect one call of it.
TEST_CASE("a batch norm between shared modules is called more often later",
          "[runtime][tensor_parallel][R19][R42]") {
  check_means(true);
}
