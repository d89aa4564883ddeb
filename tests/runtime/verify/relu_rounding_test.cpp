// ctest: seconds=15 label=proof
#include "tests/support/catch.hpp"

#include "runtime/train/models/t5.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>

// A shared T5 with its ReLU: in float32 rounding may decide whether a number
// has a gradient (docs/verify.md). In float64 no number lies so near to 0, so
// that all seeds have to give the numbers of one process.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 200, tokens = 32, peers = 2, rows = 4;

/// The sizes of config/models/t5.toml; the head has a weight of its own.
t5 make_model(uint64_t seed) {
  static std::mutex mutex; // the generator is the process's
  std::unique_lock guard{mutex};
  torch::manual_seed(seed);
  model_sizes sizes;
  sizes.vocabulary = words;
  sizes.layers = sizes.decoder_layers = 2;
  sizes.heads = 4;
  sizes.width = 128;
  sizes.norm_eps = 1e-6;
  t5 result{sizes};
  result->to(torch::kDouble);
  return result;
}

/// [peers * rows, tokens]
Tensor samples(uint64_t seed) {
  auto n = peers * rows * tokens;
  auto at = torch::arange(n) + static_cast<int64_t>(seed) * n;
  return (at * at * 31 + at * 7 + 2).remainder(words).view({-1, tokens});
}

template <class Model>
Tensor loss_of(Model& model, const Tensor& x) {
  auto y = model(x, t5_decoder_tokens(x), torch::ones_like(x));
  return torch::nn::functional::cross_entropy(y.flatten(0, 1), x.flatten());
}

struct expectation {
  numbers gradients; // also under second names
  std::set<const void*> parameters;
};

expectation alone(uint64_t seed) {
  auto model = make_model(seed);
  for (auto& part : samples(seed).chunk(peers))
    (loss_of(model, part) / static_cast<double>(peers)).backward();
  expectation result;
  for (auto& p : model->named_parameters()) {
    result.gradients.emplace(p.key(), p.value().grad());
    result.parameters.insert(p.value().unsafeGetTensorImpl());
  }
  return result;
}

numbers together(uint64_t seed, const std::string& optimize) {
  numbers result;
  virtual_world_options world;
  auto& config = world.config;
  config.tensor_parallel_degree = peers;
  config.tensor_parallel_modules = {"*"};
  config.optimize = optimize;
  config.ddp = true;
  config.trace_device = "none";
  config.threads = 1;
  run_virtual_world(peers, world, [&](session& s) {
    distributed_model model{make_model(seed)};
    auto train_step = step([&](Tensor y) {
      auto loss = loss_of(model, y);
      model.backward(loss);
      return loss.detach();
    });
    train_step(samples(seed).chunk(peers).at(dp_rank()));
    auto gradients = model.gradients();
    if (s.rank() == 0)
      result = {gradients.begin(), gradients.end()};
  });
  return result;
}

} // namespace

TEST_CASE("a shared T5 with its ReLU equals one process in float64",
          "[runtime][verify][tensor_parallel]") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto expected = alone(seed);
    for (std::string optimize : {"speed", "memory"}) {
      INFO("seed " << seed << " for " << optimize);
      auto mine = together(seed, optimize);
      CHECK(mine.size() == expected.parameters.size());
      numbers wanted;
      for (auto& [name, x] : mine)
        wanted.emplace(name, expected.gradients.at(name));
      check_near(mine, wanted, {1e-10, 1e-13});
    }
  }
}
