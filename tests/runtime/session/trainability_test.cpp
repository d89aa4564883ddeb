#include "tests/support/catch.hpp"

#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/utils.h>

#include <mutex>
#include <string>
#include <vector>

// Parameters that are frozen and unfrozen between steps, as every rank does it,
// have the gradients of one process, whatever is remembered of earlier steps.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t microbatches = 2;

Tensor input() {
  return torch::linspace(-1, 1, 12).view({4, 3});
}

/// The code of rank 1.
Tensor twice(function_impl& self, Tensor x) {
  return x * self.weight * 2;
}

/// The code of rank 0, which uses the parameter of rank 1 besides.
template <class Call>
Tensor forward(Call call, const Tensor& here, const Tensor& weight, Tensor x) {
  return (call(call(x)) * here + weight).square();
}

/// @returns the gradients of `here` and `there.weight` in one process;
/// undefined ones are left out
std::map<std::string, Tensor> plain(bool trainable) {
  auto here = torch::full({3}, 2.0).requires_grad_(true);
  auto weight = torch::ones({3}).requires_grad_(trainable);
  auto call = [&](const Tensor& x) { return x * weight * 2; };
  for (auto& x : input().chunk(microbatches))
    (forward(call, here, weight, x).sum() / microbatches).backward();
  std::map<std::string, Tensor> result{{"here", here.grad()}};
  if (trainable)
    result.emplace("there.weight", weight.grad());
  return result;
}

struct mode {
  bool fast = false;
  bool replays = false;
};

/// What a step on rank 0 did.
struct seen_step {
  std::map<std::string, Tensor> gradients;
  bool replayed = false;
};

/// @param steps whether `there.weight` is trained in them
std::vector<seen_step> run(mode x, const std::vector<bool>& steps) {
  std::vector<seen_step> result;
  auto world = manual_world(2, microbatches);
  world.config.fast_mode = x.fast;
  world.config.static_mode = x.replays;
  if (x.replays)
    world.config.static_steps = 1;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] {
      return caller{twice, [](caller_impl& self, Tensor y) {
                      return forward([&](Tensor z) { return self.there(z); },
                                     self.here, self.there->weight, y);
                    }};
    })};
    // What is frozen when the model is divided can be trained later.
    model->there->weight.requires_grad_(steps.front());
    auto train_step = training_step(model, sum_of);
    for (auto trainable : steps) {
      for (auto& p : model->parameters())
        p.mutable_grad() = Tensor{};
      model->there->weight.requires_grad_(trainable);
      train_step(input());
      auto gradients = model.gradients();
      if (s.rank() == 0)
        result.push_back(
          {{gradients.begin(), gradients.end()}, s.last_step().replayed});
    }
  });
  return result;
}

void check(const seen_step& x, bool trainable) {
  auto expected = plain(trainable);
  REQUIRE(x.gradients.size() == expected.size());
  for (auto& [name, y] : expected) {
    INFO(name);
    REQUIRE(x.gradients.contains(name));
    CHECK(torch::allclose(x.gradients.at(name), y, 1e-5, 1e-7));
  }
}

} // namespace

TEST_CASE("parameters may be frozen and unfrozen between steps",
          "[runtime][fast][static][R14][R38]") {
  mode x{GENERATE(false, true), GENERATE(false, true)};
  bool first = GENERATE(false, true);
  CAPTURE(x.fast, x.replays, first);
  // Four steps each, the last ones like the first ones.
  std::vector<bool> steps;
  for (int i = 0; i < 12; ++i)
    steps.push_back((i / 4 == 1) != first);
  auto seen = run(x, steps);
  REQUIRE(seen.size() == steps.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    CAPTURE(i);
    check(seen[i], steps[i]);
    if (i % 4 == 3)
      CHECK(seen[i].replayed == x.replays);
  }
  // What was learnt before is remembered.
  CHECK(seen[8].replayed == x.replays);
}
