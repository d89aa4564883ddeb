// ctest: timeout=300
#include "tests/support/catch.hpp"

#include "runtime/nn/layers.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <initializer_list>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

// Random modules of random sizes and types in random grids: what ranks share is
// what one process computes with plain LibTorch (R35).

using namespace smp;
using namespace smp::test;

namespace {

namespace nn = torch::nn;

enum class part { linear, conv, norm, layer };

/// All that follows from a seed.
struct setup {
  explicit setup(uint32_t seed) : rng_{seed} {
    tensor = one_of({1, 2, 2, 2, 4});
    pipeline = one_of({1, 1, 2});
    rest = tensor * pipeline > 4 ? 1 : one_of({1, 1, 2});
    microbatches = one_of({1, 2, 3});
    samples = one_of({1, 2, 3});
    tokens = one_of({1, 2, 5});
    rows = one_of({3, 7, 20, 41});
    width = one_of({3, 4, 6, 7, 8, 12, 16, 20});
    heads = width % 4 == 0 ? one_of({1, 2, 4}) : 1;
    inner = one_of({5, 8, 12, 30});
    type = std::vector{torch::kFloat, torch::kFloat, torch::kDouble,
                       torch::kBFloat16}[draw(4)];
    for (auto n = 1 + draw(4); n > 0; --n)
      parts.push_back(static_cast<part>(draw(4)));
    names_norms = draw(2) == 0;
    optimize = draw(2) == 0 ? "speed" : "memory";
    schedule = std::vector{"simple", "interleaved", "1f1b"}[draw(3)];
    placement = std::vector{"cluster", "spread", "TDP"}[draw(3)];
    fast = draw(3) > 0;
    bias = draw(3) > 0;
  }

  std::string text() const {
    std::string kinds;
    for (auto x : parts)
      kinds += "LCNT"[static_cast<size_t>(x)];
    return fmt::format(
      "t{} p{} d{} {} {} {}, {} microbatches of {} x {}, {} "
      "rows, width {}, {} heads, inner {}, {}{}{}, {} {}",
      tensor, pipeline, rest, placement, schedule, fast ? "fast" : "waits",
      microbatches, samples, tokens, rows, width, heads, inner, kinds,
      bias ? " bias" : "", names_norms ? " norms" : "", optimize,
      c10::toString(type));
  }

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = static_cast<uint64_t>(pipeline);
    x.tensor_parallel_degree = static_cast<uint64_t>(tensor);
    x.tensor_parallel_modules = {"*"};
    if (names_norms)
      for (size_t i = 0; i < parts.size(); ++i)
        if (parts[i] == part::norm)
          x.tensor_parallel_modules.push_back(fmt::format("body.{}", i));
    x.placement_strategy = placement;
    x.optimize = optimize;
    x.pipeline = schedule;
    x.fast_mode = fast;
    x.ddp = true;
    x.microbatches = static_cast<uint64_t>(microbatches);
    x.trace_device = "none";
    x.threads = 1;
    return x;
  }

  int64_t replicas() const {
    return tensor * rest;
  }

  /// [samples, tokens] of each microbatch of all replicas.
  Tensor data() const {
    auto n = replicas() * microbatches * samples;
    return (torch::arange(n * tokens).view({n, tokens}) * 13 + 5) % rows;
  }

  int64_t tensor, pipeline, rest, microbatches, samples, tokens, rows, width,
    heads, inner;
  torch::Dtype type;
  std::vector<part> parts;
  bool names_norms, fast, bias;
  std::string optimize, schedule, placement;

private:
  size_t draw(size_t n) {
    return rng_() % n;
  }

  int64_t one_of(std::initializer_list<int64_t> xs) {
    return xs.begin()[draw(xs.size())];
  }

  std::mt19937 rng_;
};

/// Two tables, one of them with a number for each word, and any parts.
struct random_net_impl : nn::Module {
  explicit random_net_impl(const setup& x) {
    register_module("table", table = submodule<nn::Embedding>(x.rows, x.width));
    register_module("scores", scores = submodule<nn::Embedding>(x.rows, 1));
    for (auto kind : x.parts)
      add(kind, x);
    register_module("body", body);
    to(x.type);
    at::NoGradGuard no_grad;
    for (auto& p : parameters())
      p.normal_(0, 0.5);
  }

  Tensor forward(Tensor x) {
    auto y = torch::tanh(body->forward(table(x)) + scores(x));
    // Of all numbers, so that no norm at the end makes it a constant.
    auto weights = torch::sin(torch::arange(y.numel()) + 1.0).view(y.sizes());
    return (y * weights.to(y.scalar_type())).sum();
  }

  submodule<nn::Embedding> table = nullptr;
  submodule<nn::Embedding> scores = nullptr;
  nn::Sequential body;

private:
  void add(part kind, const setup& x) {
    gpt_config sizes;
    sizes.width = x.width;
    sizes.heads = x.heads;
    sizes.feed_forward = x.inner;
    switch (kind) {
      case part::linear:
        return body->push_back(
          nn::Linear(nn::LinearOptions(x.width, x.width).bias(x.bias)));
      case part::conv:
        return body->push_back(conv1d(x.width, x.width, 1));
      case part::norm:
        return body->push_back(nn::LayerNorm(
          nn::LayerNormOptions({x.width}).elementwise_affine(x.bias)));
      default:
        return body->push_back(gpt_block(sizes, 0));
    }
  }
};
TORCH_MODULE_IMPL(random_net, random_net_impl);

using numbers = std::map<std::string, Tensor>;

/// @param type that it computes in, from the same numbers
numbers alone(const setup& x, torch::Dtype type) {
  auto model = seeded([&] { return random_net{x}; });
  model->to(type);
  auto parts = x.data().chunk(x.replicas() * x.microbatches);
  numbers result;
  for (auto& part : parts)
    (model->forward(part) / static_cast<double>(parts.size())).backward();
  for (auto& p : model->named_parameters())
    result.emplace(p.key(), p.value().grad());
  return result;
}

numbers together(const setup& x) {
  numbers result;
  std::mutex mutex;
  virtual_world_options world;
  world.config = x.config();
  world.reorder = true;
  auto ranks = static_cast<uint64_t>(x.replicas() * x.pipeline);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return random_net{x}; })};
    auto train_step = step([&](Tensor y) {
      auto loss = model(y);
      model.backward(loss);
      return loss;
    });
    train_step(x.data().chunk(x.replicas()).at(dp_rank()));
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = {gradients.begin(), gradients.end()};
  });
  return result;
}

double largest(const Tensor& x) {
  return x.abs().max().item<double>();
}

void check_seeds(uint32_t first, uint32_t last) {
  for (auto seed = first; seed < last; ++seed) {
    setup x{seed};
    INFO("seed " << seed << ": " << x.text());
    auto expected = alone(x, x.type);
    auto exact = alone(x, torch::kDouble);
    auto mine = together(x);
    REQUIRE(mine.size() == expected.size());
    for (auto& [name, t] : expected) {
      INFO(name);
      REQUIRE(mine.contains(name));
      REQUIRE(mine.at(name).sizes() == t.sizes());
      CHECK(mine.at(name).scalar_type() == t.scalar_type());
      // What rounding costs one process, it may cost ranks.
      auto share = x.type == torch::kDouble  ? 1e-11
                   : x.type == torch::kFloat ? 1e-5
                                             : 6e-2;
      auto rounding = largest(t - exact.at(name));
      auto allowed = share * largest(t) + 4 * rounding;
      CHECK(largest(mine.at(name) - t) <= allowed + 1e-7);
    }
  }
}

} // namespace

TEST_CASE(
  "shared modules of any kind in any grid compute what one process "
  "does, 100 times",
  "[runtime][tensor_parallel]") {
  check_seeds(0, 100);
}

TEST_CASE("the same 1000 times", "[runtime][tensor_parallel][.long]") {
  check_seeds(100, 1100);
}
