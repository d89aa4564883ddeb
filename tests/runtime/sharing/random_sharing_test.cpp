#include "tests/support/catch.hpp"

#include "runtime/nn/layers.hpp"
#include "runtime/nn/lm_head.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
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
    placement = std::vector{
      "cluster", "spread", "TDP", "DTP", "PDT", "PTD"}[draw(6)];
    fast = draw(3) > 0;
    bias = draw(3) > 0;
    same = draw(3) == 0 && tensor > 1;
    attends = draw(4) == 0;
    // Its gradients of keys' biases are zero but for rounding.
    if (attends && type == torch::kBFloat16)
      type = torch::kFloat;
    has_head = draw(4) == 0;
  }

  std::string text() const {
    std::string kinds;
    for (auto x : parts)
      kinds += "LCNT"[static_cast<size_t>(x)];
    return fmt::format(
      "t{} p{} d{} {} {} {}, {} microbatches of {} x {}, {} "
      "rows, width {}, {} heads, inner {}, {}{}{}{}{}{}, {} {}",
      tensor, pipeline, rest, placement, schedule, fast ? "fast" : "waits",
      microbatches, samples, tokens, rows, width, heads, inner, kinds,
      bias ? " bias" : "", names_norms ? " norms" : "",
      attends ? " attends" : "", has_head ? " head" : "",
      same ? " same samples" : "", optimize, c10::toString(type));
  }

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = static_cast<uint64_t>(pipeline);
    x.tensor_parallel_degree = static_cast<uint64_t>(tensor);
    if (tensor > 1)
      x.tensor_parallel_modules = {"*"};
    if (tensor > 1 && names_norms)
      for (size_t i = 0; i < parts.size(); ++i)
        if (parts[i] == part::norm)
          x.tensor_parallel_modules.push_back(fmt::format("body.{}", i));
    if (tensor * pipeline > 1)
      x.placement_strategy = placement;
    x.optimize = optimize;
    x.pipeline = schedule;
    x.fast_mode = fast;
    x.ddp = true;
    x.prescaled_batch = same;
    x.microbatches = static_cast<uint64_t>(microbatches);
    x.trace_device = "none";
    x.threads = 1;
    return x;
  }

  int64_t ranks() const {
    return tensor * pipeline * rest;
  }

  /// Parts of a batch, each for a replica or for those that share.
  int64_t shares() const {
    return same ? rest : tensor * rest;
  }

  /// [samples, tokens] of each microbatch of all shares.
  Tensor data() const {
    auto n = shares() * microbatches * samples;
    return (torch::arange(n * tokens).view({n, tokens}) * 13 + 5) % rows;
  }

  int64_t tensor, pipeline, rest, microbatches, samples, tokens, rows, width,
    heads, inner;
  torch::Dtype type;
  std::vector<part> parts;
  bool names_norms, fast, bias, same, attends, has_head;
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

/// Two tables, one of them with a number for each word, and any parts; perhaps
/// a layer that attends to the words, and a loss of them.
struct random_net_impl : nn::Module {
  explicit random_net_impl(const setup& x) : rows(x.rows) {
    register_module("table", table = submodule<nn::Embedding>(x.rows, x.width));
    register_module("scores", scores = submodule<nn::Embedding>(x.rows, 1));
    for (auto kind : x.parts)
      add(kind, x);
    register_module("body", body);
    if (x.attends)
      register_module("decoder", decoder = make_decoder(x));
    if (x.has_head)
      register_module("head", head = submodule<smp::nn::lm_head>(
                                torch::empty({x.rows, x.width})));
    to(x.type);
    at::NoGradGuard no_grad;
    for (auto& p : parameters())
      p.normal_(0, 0.5);
  }

  Tensor forward(Tensor x) {
    auto words = table(x);
    auto h = body->forward(words);
    if (decoder) {
      auto none = torch::zeros({1, 1, 1, x.size(1)}, h.options()); // hidden
      h = decoder(smp::nn::layer_states{h, none, words, none}).at(0);
    }
    auto y = torch::tanh(h + scores(x));
    // Of all numbers, so that no norm at the end makes it a constant.
    auto weights = torch::sin(torch::arange(y.numel()) + 1.0).view(y.sizes());
    auto result = (y * weights.to(y.scalar_type())).sum();
    return head ? result + head(h, std::optional{(x + 1) % rows}) : result;
  }

  submodule<nn::Embedding> table = nullptr;
  submodule<nn::Embedding> scores = nullptr;
  nn::Sequential body;
  submodule<smp::nn::distributed_transformer_layer> decoder = nullptr;
  submodule<smp::nn::lm_head> head = nullptr;
  int64_t rows; // also where ranks have only some of them

private:
  static submodule<smp::nn::distributed_transformer_layer>
  make_decoder(const setup& x) {
    smp::nn::transformer_layer_arguments sizes;
    sizes.num_attention_heads = x.heads;
    sizes.attention_head_size = x.width / x.heads;
    sizes.hidden_size = x.width;
    sizes.intermediate_size = x.inner;
    sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0;
    sizes.causal_mask_size = x.tokens;
    sizes.add_cross_attention = true;
    return submodule<smp::nn::distributed_transformer_layer>{sizes};
  }

  void add(part kind, const setup& x) {
    model_sizes sizes;
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
  auto parts = x.data().chunk(x.shares() * x.microbatches);
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
  run_virtual_world(static_cast<uint64_t>(x.ranks()), world, [&](session& s) {
    distributed_model model{seeded([&] { return random_net{x}; })};
    auto train_step = training_step(model);
    train_step(x.data().chunk(x.shares()).at(data_rank()));
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
