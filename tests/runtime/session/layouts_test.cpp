#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"

#include <torch/nn/modules/dropout.h>

#include <fmt/format.h>

#include <string>
#include <vector>

// The order of a tensor's axes in memory is that of one process wherever it
// goes, so what depends on it (which number of a stream is whose, what is asked
// whether it is contiguous, in which order a sum is made) has the bits of one
// process (R63).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t tall = 8, wide = 6;

/// Draws numbers in the order of memory.
template <template <class> class P>
struct drops : torch::nn::Module {
  drops() {
    register_module("drop", drop);
    register_parameter("weight", weight);
  }
  Tensor forward(Tensor x) {
    auto y = drop(x) + torch::rand_like(x) * 0.5;
    return (x.is_contiguous() ? y : y * 1.5) * weight;
  }
  torch::nn::Dropout drop{0.4};
  Tensor weight = torch::full({1}, 1.25);
};

/// Its result has other axes than its argument, and it looks at the gradient.
template <template <class> class P>
struct turns : torch::nn::Module {
  turns() {
    register_parameter("weight", weight);
  }
  Tensor forward(Tensor x) {
    auto y = x * weight;
    if (y.requires_grad())
      y.register_hook(
        [](Tensor g) { return g.is_contiguous() ? g * 2 : g * 0.5; });
    return y.transpose(0, 1);
  }
  Tensor weight = torch::full({1}, 0.75);
};

template <template <class> class P>
struct turned : torch::nn::Module {
  turned() {
    register_module("first", first);
    register_module("turn", turn);
    register_module("second", second);
    register_module("third", third);
    register_module("again", again);
  }
  Tensor forward(Tensor x) {
    auto a = first(x.transpose(0, 1));
    auto b = turn(a);
    auto c = second(b);
    // Nothing has touched what they contain.
    if (!a.is_contiguous() && b.is_contiguous() && c.stride(0) == wide)
      c = c * 0.5;
    auto d = again(third(c.transpose(0, 1)));
    auto noise = torch::sin(torch::arange(tall * wide) * 0.3);
    return (d.transpose(0, 1) * noise.view({wide, tall})).sum() * 0.01;
  }
  P<torch::nn::ModuleHolder<drops<P>>> first, second, third;
  P<torch::nn::ModuleHolder<turns<P>>> turn, again;
};

/// Has its argument as it is.
template <template <class> class P>
struct as_given : torch::nn::Module {
  as_given() {
    register_module("first", first);
    register_module("second", second);
  }
  Tensor forward(Tensor x) {
    return second(first(x)).square().sum();
  }
  P<torch::nn::ModuleHolder<drops<P>>> first, second;
};

Tensor sines(int64_t seed) {
  auto x = torch::arange(tall * wide);
  return torch::sin(x * (static_cast<double>(seed + 1) * 0.7));
}

/// Equal means: the same bits.
model_options exactly(uint64_t ranks, bool fast, bool replay, int steps) {
  model_options result;
  result.ranks = ranks;
  result.fast = fast;
  result.replay = replay;
  result.steps = steps;
  result.tolerance = 0;
  result.absolute = 0;
  return result;
}

} // namespace

TEST_CASE("what depends on the order of axes has the bits of one process",
          "[runtime][R63]") {
  auto ranks = GENERATE(1u, 2u, 4u);
  auto fast = GENERATE(false, true);
  auto replay = GENERATE(false, true);
  INFO(fmt::format("{} ranks{}{}", ranks, fast ? ", fast" : "",
                   replay ? ", replayed" : ""));
  auto x = exactly(ranks, fast, replay && ranks > 1, 6);
  std::vector<Tensor> batches;
  for (int i = 0; i < x.steps; ++i)
    batches.push_back(sines(i).view({tall, wide}));
  auto steps = run_ranks<turned>(x, batches);
  CHECK(differences<turned>(x, batches, steps) == std::vector<std::string>{});
  CHECK(steps.back().stats.replayed == x.replay);
}

TEST_CASE("batches of another order of axes are another kind of step",
          "[runtime][static][R33][R63]") {
  auto x = exactly(2, false, true, 8);
  std::vector<Tensor> batches;
  for (int i = 0; i < x.steps; ++i)
    batches.push_back(i % 2 == 0 ? sines(i).view({tall, wide})
                                 : sines(i).view({wide, tall}).t());
  auto steps = run_ranks<as_given>(x, batches);
  CHECK(differences<as_given>(x, batches, steps) == std::vector<std::string>{});
  for (auto& y : steps)
    CHECK_FALSE(y.stats.fell_back);
  for (size_t i : {6, 7})
    CHECK(steps[i].stats.replayed);
}
