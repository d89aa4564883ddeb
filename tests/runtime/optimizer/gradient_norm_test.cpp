#include "tests/support/catch.hpp"

#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>

#include <mutex>
#include <string>
#include <vector>

// The norm of all gradients, and with it what clipping makes of them, does not
// depend on which rank has which: measured times decide that, and differ from
// run to run.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 32, tokens = 8;
constexpr size_t layers = 4;

gpt make_gpt() {
  gpt_config x;
  x.vocabulary = words;
  x.sequence_length = tokens;
  x.layers = layers;
  x.heads = 2;
  x.width = 16;
  return gpt{x};
}

/// @param first so many layers are on the first of two ranks
/// @returns the norms of some steps
std::vector<double> norms_of(uint64_t ranks, size_t first) {
  auto world = manual_world(ranks);
  std::vector<double> result;
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    auto whole = seeded(make_gpt);
    for (size_t i = first; i < layers; ++i)
      set_partition(*whole->transformer->h->ptr(i), 1);
    distributed_model model{whole};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = token_loss(model(x), x);
      model.backward(loss);
      return loss.detach();
    });
    for (int64_t i = 0; i < 8; ++i) {
      optimizer.zero_grad();
      train_step((torch::arange(4 * tokens).view({4, tokens}) * (7 + i) + 3)
                 % words);
      auto norm = clip_grad_norm_(model, 0.5);
      optimizer.step();
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        result.push_back(norm);
    }
  });
  return result;
}

} // namespace

TEST_CASE("the norm of gradients has the same bits in every partition",
          "[runtime][optimizer][R33]") {
  auto expected = norms_of(1, layers);
  REQUIRE(expected.size() == 8);
  for (size_t first = 0; first < layers; ++first) {
    CAPTURE(first);
    CHECK(norms_of(2, first) == expected);
  }
}
