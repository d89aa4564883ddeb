#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

// Calls that wait in every step, since nobody can tell what they return or as
// they change state: what their caller only passes on does not come to it
// (R38).

using namespace smp;
using namespace smp::test;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 128;
constexpr uint64_t tensor_bytes = width * width * sizeof(float);

/// A layer whose results are not a tuple: two tensors, the second half as
/// large.
struct listed_impl : torch::nn::Module {
  listed_impl() {
    register_module("layer", layer);
  }

  std::vector<Tensor> forward(Tensor x) {
    auto y = torch::tanh(layer(x));
    return {y, y.narrow(0, 0, y.size(0) / 2) * 2};
  }

  Linear layer{width, width};
};
TORCH_MODULE_IMPL(listed, listed_impl);

/// What the body does between the calls of one step.
using look = std::function<void(const std::vector<Tensor>&)>;

/// a, b and c, the second one on a rank of its own.
struct lists_impl : torch::nn::Module {
  explicit lists_impl(uint32_t ranks)
    : here(register_parameter("here", torch::full({1}, 1.5))) {
    for (uint32_t i = 0; i < 3; ++i) {
      partition_scope on{(i % 2 == 0 ? 1u : 2u) % ranks};
      layers.emplace_back(submodule<listed>{});
      register_module(std::string(1, static_cast<char>('a' + i)),
                      layers.back());
    }
  }

  Tensor forward(Tensor x, const look& f) {
    auto a = layers[0](x * here);
    auto b = layers[1](a[0]);
    f(b);
    return layers[2](b[0])[0] * here;
  }

  Tensor here;
  std::vector<submodule<listed>> layers;
};
TORCH_MODULE_IMPL(lists, lists_impl);

/// The same of modules that change state.
struct norms_impl : torch::nn::Module {
  explicit norms_impl(uint32_t ranks)
    : here(register_parameter("here", torch::full({1}, 1.5))) {
    for (uint32_t i = 0; i < 3; ++i) {
      partition_scope on{(i % 2 == 0 ? 1u : 2u) % ranks};
      layers.emplace_back(width);
      register_module(std::string(1, static_cast<char>('a' + i)),
                      layers.back());
    }
  }

  Tensor forward(Tensor x, const look& f) {
    auto a = layers[0](x * here);
    auto b = layers[1](a);
    f({b});
    return layers[2](b) * here;
  }

  Tensor here;
  std::vector<submodule<BatchNorm1d>> layers;
};
TORCH_MODULE_IMPL(norms, norms_impl);

struct seen {
  /// What rank 0 sent, and all ranks, by step: in tensors of `tensor_bytes`.
  std::vector<double> sent;
  std::vector<double> moved;
  std::vector<Tensor> losses;
  named_tensors gradients;
  std::map<std::string, Tensor> state;
  uint64_t replayed = 0; // ranks, in the last step
};

template <class Model>
seen run(uint64_t ranks, const virtual_world_options& world, int steps,
         const std::function<void(int, const std::vector<Tensor>&)>& f) {
  seen result;
  std::mutex mutex;
  result.sent.resize(steps);
  result.moved.resize(steps);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model<Model> model{
      seeded([&] { return Model{static_cast<uint32_t>(ranks)}; })};
    int now = 0;
    auto train_step = step([&](Tensor x) {
      auto loss = model(x, [&](auto& y) { f(now, y); }).pow(2).mean();
      model.backward(loss);
      return loss;
    });
    auto n = width * static_cast<int64_t>(world.config.microbatches);
    auto x = torch::sin(torch::arange(n * width * 1.0)).view({n, width});
    for (; now < steps; ++now) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      auto loss = train_step(x.to(torch::kFloat)).reduce_mean();
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      auto state = model.state_dict();
      auto stats = s.last_step();
      auto tensors = static_cast<double>(stats.bytes_sent)
                     / static_cast<double>(tensor_bytes);
      std::unique_lock guard{mutex};
      result.moved[now] += tensors;
      if (now == steps - 1)
        result.replayed += stats.replayed;
      if (s.rank() != 0)
        continue;
      result.sent[now] = tensors;
      result.losses.push_back(loss);
      result.gradients = std::move(gradients);
      result.state = {state.begin(), state.end()};
    }
  });
  return result;
}

/// Tells whether both saw the same numbers, however the model was divided.
bool equal(const seen& a, const seen& b) {
  auto close = [](const Tensor& x, const Tensor& y) {
    return torch::allclose(x, y, 1e-5, 1e-7);
  };
  if (a.losses.size() != b.losses.size()
      || a.gradients.size() != b.gradients.size()
      || a.state.size() != b.state.size() || a.gradients.empty())
    return false;
  for (size_t i = 0; i < a.losses.size(); ++i)
    if (!close(a.losses[i], b.losses[i]))
      return false;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    if (!close(a.gradients[i].second, b.gradients[i].second))
      return false;
  for (auto& [name, x] : a.state)
    if (!close(x, b.state.at(name)))
      return false;
  return true;
}

virtual_world_options world_of(uint64_t ranks, uint64_t microbatches = 1) {
  auto result = manual_world(ranks, microbatches);
  result.reorder = microbatches > 1;
  return result;
}

void look_away(int, const std::vector<Tensor>&) {
  // nop
}

/// Reads what a kind of call returns, in some steps.
auto look_in(int first, int last) {
  return [first, last](int now, const std::vector<Tensor>& xs) {
    if (now >= first && now <= last && xs[0].sum().item<double>() == 0.125)
      throw std::runtime_error{"this cannot be"};
  };
}

} // namespace

TEST_CASE("what the caller only passes on does not come to it",
          "[runtime][fast][R38]") {
  // The first step finds out that such calls wait, the second one what their
  // caller takes.
  constexpr int steps = 3;
  auto lists_alone = run<lists>(1, world_of(1), steps, look_away);
  auto norms_alone = run<norms>(1, world_of(1), steps, look_away);
  // x goes to a, and the gradient of its last result to c.
  constexpr double least = 2;
  SECTION("with promises") {
    auto world = world_of(3);
    world.config.fast_mode = GENERATE(std::optional<bool>{}, true);
    auto x = run<lists>(3, world, steps, look_away);
    CHECK(x.sent[0] > least + 1);
    CHECK(x.sent[2] < least + 0.5);
    CHECK(equal(x, lists_alone));
    auto y = run<norms>(3, world, steps, look_away);
    CHECK(y.sent[0] > least + 1);
    CHECK(y.sent[2] < least + 0.5);
    CHECK(equal(y, norms_alone));
  }
  SECTION("and does without") {
    auto world = world_of(3);
    if (GENERATE(false, true))
      world.config.fast_mode = false;
    else
      world.config.no_promises = {"a", "b", "c"};
    auto x = run<lists>(3, world, steps, look_away);
    CHECK(x.sent[2] > least + 2);
    CHECK(equal(x, lists_alone));
  }
}

TEST_CASE("what a caller takes after all is fetched once, and comes from then",
          "[runtime][fast][R38]") {
  constexpr int steps = 9;
  // Of b's two results the first one, in the steps 4 to 6.
  auto world = world_of(3);
  auto x = run<lists>(3, world, steps, look_in(4, 6));
  CHECK(equal(x, run<lists>(1, world_of(1), steps, look_in(4, 6))));
  // Touched, it is a tensor of rank 0, which sends it to c.
  for (int i = 3; i < steps; ++i) {
    CAPTURE(i);
    auto looks = i >= 4 && i <= 6;
    CHECK(x.sent[i] > (looks ? 3 : 2));
    CHECK(x.sent[i] < (looks ? 3.5 : 2.5));
  }
  // The step after the last look gets it in vain, but not the next one.
  CHECK(x.moved[7] > x.moved[3] + 0.5);
  CHECK(x.moved[8] < x.moved[3] + 0.1);
}

TEST_CASE("held results and records of steps go together",
          "[runtime][fast][static][deterministic][R33][R38]") {
  constexpr int steps = 7;
  auto fixed = GENERATE(false, true);
  auto replay = GENERATE(false, true);
  auto looks = GENERATE(false, true);
  CAPTURE(fixed, replay, looks);
  auto f = looks ? std::function<void(int, const std::vector<Tensor>&)>{look_in(
             0, steps)}
                 : look_away;
  auto world = world_of(3, 4);
  world.config.static_mode = replay;
  if (replay && !fixed)
    world.config.static_steps = 1;
  world.config.deterministic_server = fixed;
  for (world.seed = 1; world.seed <= 3; ++world.seed) {
    CAPTURE(world.seed);
    auto x = run<lists>(3, world, steps, f);
    CHECK(equal(x, run<lists>(1, world_of(1, 4), steps, f)));
    auto y = run<norms>(3, world, steps, f);
    CHECK(equal(y, run<norms>(1, world_of(1, 4), steps, f)));
    if (fixed || replay) {
      CHECK(x.replayed == 3);
      CHECK(y.replayed == 3);
    }
    if (!looks) {
      CHECK(x.sent.back() < 4 * 2.5);
      CHECK(y.sent.back() < 4 * 2.5);
    }
  }
}
