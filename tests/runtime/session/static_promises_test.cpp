// ctest: timeout=300
#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

// Promises in replayed steps (R33, R38): what travels, and that numbers stay.

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 8;

/// Layers on other ranks, called by any code.
struct layers_impl : torch::nn::Module {
  using code = std::function<Tensor(layers_impl&, Tensor)>;

  layers_impl(uint32_t ranks, code f)
    : here(register_parameter("here", torch::full({1}, 1.5))), f(std::move(f)) {
    for (uint32_t i = 0; i < 6; ++i) {
      partition_scope on{1 + i % (ranks - 1)};
      xs.emplace_back(width, width);
      register_module(fmt::format("layer{}", i), xs.back());
    }
  }

  Tensor forward(Tensor x) {
    return f(*this, x * here);
  }

  Tensor here;
  std::vector<submodule<Linear>> xs;
  code f;
};
TORCH_MODULE_IMPL(layers, layers_impl);

Tensor chain(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = layer(x);
  return x;
}

/// The first result is used again at the end.
Tensor long_skip(layers_impl& m, Tensor x) {
  auto first = m.xs[0](x);
  auto y = first;
  for (size_t i = 1; i < 5; ++i)
    y = m.xs[i](y);
  return m.xs[5](torch::tanh(y) + first);
}

/// Each result is used again on the way back.
Tensor hourglass(layers_impl& m, Tensor x) {
  auto a = m.xs[0](x), b = m.xs[1](a), c = m.xs[2](b);
  auto d = m.xs[3](torch::relu(c) + b);
  return m.xs[4](d + a) * x;
}

Tensor residuals(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = x + layer(x);
  return x;
}

/// Only the last call of a layer has a result that its caller looks at.
Tensor recurrent(layers_impl& m, Tensor x) {
  for (int i = 0; i < 4; ++i)
    x = m.xs[1](m.xs[0](x));
  return torch::tanh(x);
}

/// Looks at everything.
Tensor touches(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = torch::tanh(layer(x));
  return x;
}

const std::map<std::string, layers_impl::code> programs{
  {"chain", chain},         {"long skip", long_skip}, {"hourglass", hourglass},
  {"residuals", residuals}, {"recurrent", recurrent}, {"touches", touches}};

struct mode {
  bool fast = false;
  bool replay = false;
};

/// What the last of several steps sent, all ranks together.
struct traffic {
  uint64_t bytes = 0;
  uint64_t messages = 0;
  uint64_t requests = 0;
  uint64_t waits = 0;
  uint64_t replayed = 0; // ranks
  Tensor loss;
  named_tensors gradients;
};

traffic run(const layers_impl::code& f, uint32_t ranks, mode how,
            int64_t rows = 2) {
  constexpr uint64_t microbatches = 4;
  constexpr int steps = 6;
  auto world = manual_world(ranks, microbatches);
  world.config.fast_mode = how.fast;
  world.config.static_mode = how.replay;
  world.config.static_steps = 1;
  world.reorder = false;
  traffic result;
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return layers{ranks, f}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).pow(2).sum();
      model.backward(loss);
      return loss;
    });
    auto n = static_cast<int64_t>(microbatches) * rows;
    auto x = torch::sin(torch::arange(n * width * 1.0)).view({n, width});
    for (int i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      auto& fabric = s.internals().fabric();
      auto before = fabric.stats().messages_sent;
      auto loss = train_step(x.to(torch::kFloat)).reduce_mean();
      auto messages = fabric.stats().messages_sent - before;
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      auto stats = s.last_step();
      std::unique_lock guard{mutex};
      if (i < steps - 1)
        continue;
      result.replayed += stats.replayed;
      result.bytes += stats.bytes_sent;
      result.requests += stats.requests;
      result.waits += stats.waits;
      result.messages += messages;
      if (s.rank() == 0) {
        result.loss = loss;
        result.gradients = std::move(gradients);
      }
    }
  });
  return result;
}

bool equal(const traffic& a, const traffic& b) {
  if (!torch::allclose(a.loss, b.loss, 1e-5, 1e-6)
      || a.gradients.size() != b.gradients.size())
    return false;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    if (!torch::allclose(a.gradients[i].second, b.gradients[i].second, 1e-4,
                         1e-5))
      return false;
  return true;
}

} // namespace

TEST_CASE("a replayed step with promises sends least of all",
          "[runtime][fast][static][R33]") {
  auto* name = GENERATE("chain", "long skip", "hourglass", "residuals",
                        "recurrent", "touches");
  auto& f = programs.at(name);
  auto ranks = GENERATE(2u, 3u, 4u);
  auto rows = GENERATE(int64_t{2}, int64_t{256});
  INFO(name << ", " << ranks << " ranks, " << rows << " rows");
  auto slow = run(f, ranks, {}, rows);
  auto fast = run(f, ranks, {.fast = true}, rows);
  auto plain = run(f, ranks, {.replay = true}, rows);
  auto both = run(f, ranks, {.fast = true, .replay = true}, rows);
  UNSCOPED_INFO("bytes: " << slow.bytes << " waiting, " << fast.bytes
                          << " with promises, " << plain.bytes << " replayed, "
                          << both.bytes << " both");
  CHECK(both.replayed == ranks);
  CHECK(equal(slow, fast));
  CHECK(equal(slow, plain));
  CHECK(equal(slow, both));
  CHECK(both.bytes <= slow.bytes);
  CHECK(both.bytes <= fast.bytes);
}
