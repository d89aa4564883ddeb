#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

// The halves of a layer (smp.nn), and classes of a user's that are shared as
// them, outside of layers: by ranks, and by replicas that share nothing.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 24;
constexpr int64_t tokens = 5;
constexpr int64_t seen = 7; // of what is attended to

nn::transformer_layer_arguments arguments_of_halves(double dropout) {
  nn::transformer_layer_arguments x;
  x.num_attention_heads = heads;
  x.attention_head_size = 8; // together not as wide as hidden states
  x.hidden_size = width;
  x.intermediate_size = 40;
  x.attention_dropout_prob = x.hidden_dropout_prob = dropout;
  x.causal_mask_size = 16;
  return x;
}

/// Attention with one linear for query, key and value, and its norm before it.
struct own_attention_impl : torch::nn::Module {
  own_attention_impl() {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("back", back);
  }

  Tensor forward(Tensor x) {
    auto parts = qkv(norm(x)).chunk(3, 2);
    for (auto& y : parts)
      y = y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
    auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return x + back(y.transpose(1, 2).flatten(2));
  }

  torch::nn::LayerNorm norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  torch::nn::Linear qkv{width, 3 * 32};
  torch::nn::Linear back{32, width};
};
TORCH_MODULE_IMPL(own_attention, own_attention_impl);

/// A feed-forward half that gives more than hidden states.
struct own_output_impl : torch::nn::Module {
  own_output_impl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }

  std::tuple<Tensor, Tensor> forward(const Tensor& x, double scale) {
    auto y = x * scale;
    y = norm(y + down(torch::relu(up(y))));
    return {y, y.square().mean()};
  }

  torch::nn::LayerNorm norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  torch::nn::Linear up{width, 36};
  torch::nn::Linear down{36, width};
};
TORCH_MODULE_IMPL(own_output, own_output_impl);

[[maybe_unused]] const bool own_are_registered
  = tp_register<own_attention_impl, nn::distributed_attention_layer>(
      [](const own_attention_impl&) {
        attention_layer_options x;
        x.num_attention_heads = heads;
        x.norm = {"norm"};
        x.query_key_value = {{"qkv"}};
        x.output = {"back"};
        return x;
      })
    && tp_register<own_output_impl, nn::distributed_transformer_output_layer>(
      [](const own_output_impl&) {
        transformer_output_layer_options x;
        x.pre_layernorm = false;
        x.post_layernorm = true;
        x.activation = [](const Tensor& y) { return torch::relu(y); };
        x.norm = {"norm"};
        x.intermediate = {"up"};
        x.output = {"down"};
        return x;
      },
      [](const Tensor& x, double scale) { return x * scale; },
      [](const Tensor& y) {
        return std::tuple{y, y.square().mean()};
      });

struct halves_impl : torch::nn::Module {
  explicit halves_impl(double dropout)
    : self(arguments_of_halves(dropout)),
      cross(arguments_of_halves(dropout), true),
      output(arguments_of_halves(dropout)) {
    register_module("context", context);
    register_module("self", self);
    register_module("cross", cross);
    register_module("output", output);
    register_module("attention", attention);
    register_module("feed_forward", feed_forward);
  }

  Tensor forward(Tensor x, Tensor mask, Tensor other, Tensor shown) {
    auto y = context(other);
    auto h = self(x, Tensor{}, mask);
    h = self(h, h, Tensor{}); // once more, without a mask
    h = output(cross(h, y, shown));
    auto [result, more] = feed_forward(attention(cross(h, y, Tensor{})), 0.7);
    return result.sin().mean() + more;
  }

  submodule<torch::nn::Linear> context{6, width};
  submodule<nn::distributed_attention_layer> self, cross;
  submodule<nn::distributed_transformer_output_layer> output;
  submodule<own_attention> attention;
  submodule<own_output> feed_forward;
};
TORCH_MODULE_IMPL(halves, halves_impl);

struct run_of_halves {
  uint64_t tensor = 1;
  uint64_t pipeline = 1;
  uint64_t replicas = 1; // with samples of their own, that share or not
  std::string optimize = "memory";
  bool same_samples = false;
  double dropout = 0;

  session_config config() const {
    session_config x;
    x.tensor_parallel_degree = tensor;
    x.pipeline_parallel_degree = pipeline;
    x.optimize = optimize;
    x.prescaled_batch = same_samples;
    if (tensor > 1)
      x.tensor_parallel_modules = {"attention", "feed_forward"};
    x.ddp = true;
    x.microbatches = 2;
    x.threads = 1;
    return x;
  }

  uint64_t ranks() const {
    return (same_samples ? tensor : replicas) * pipeline;
  }
};

struct outcome {
  numbers gradients;
  std::string text;
};

outcome train_halves(const run_of_halves& x) {
  outcome result;
  std::mutex mutex;
  virtual_world_options world;
  world.reorder = true;
  world.config = x.config();
  run_virtual_world(x.ranks(), world, [&](session& s) {
    distributed_model model{seeded([&] { return halves{x.dropout}; })};
    auto train_step = step(
      [&](Tensor h, Tensor mask, Tensor other, Tensor shown) {
        auto loss = model(h, mask, other, shown);
        model.backward(loss);
        return loss;
      });
    constexpr int64_t rows = 16;
    auto mine = [](const Tensor& y) {
      return y.chunk(static_cast<int64_t>(data_size()))
        .at(static_cast<size_t>(data_rank()));
    };
    auto numbered = [](at::IntArrayRef sizes) {
      return torch::arange(c10::multiply_integers(sizes)).view(sizes);
    };
    auto mask = numbered({rows, 1, tokens, tokens}).remainder(5).mul(0.3);
    auto shown = numbered({rows, 1, 1, seen}).remainder(3).mul(0.5);
    train_step(mine(numbered({rows, tokens, width}).mul(0.7).sin()), mine(mask),
               mine(numbered({rows, seen, 6}).mul(0.9).cos()), mine(shown));
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() != 0)
      return;
    result.gradients = {gradients.begin(), gradients.end()};
    result.text = model.partition_text();
  });
  return result;
}

void check_halves(run_of_halves x) {
  CAPTURE(x.tensor, x.pipeline, x.optimize, x.same_samples, x.dropout);
  run_of_halves apart;
  apart.replicas = x.replicas;
  apart.dropout = x.dropout;
  auto expected = train_halves(apart);
  auto mine = train_halves(x);
  auto how = " shared by " + std::to_string(x.tensor) + " ranks for "
             + x.optimize + ": ";
  CHECK_THAT(mine.text, ContainsSubstring("AttentionLayer" + how
                                          + "self, cross, "
                                            "attention")
                          && ContainsSubstring("TransformerOutputLayer" + how
                                               + "output, feed_forward"));
  check_near(mine.gradients, expected.gradients, {.least = 1e-6});
}

} // namespace

TEST_CASE("ranks share halves of layers, and classes that are such halves",
          "[runtime][nn][tp_register]") {
  std::string optimize = GENERATE("memory", "speed");
  auto dropout = GENERATE(0.0, 0.2);
  SECTION("own samples") {
    auto peers = GENERATE(uint64_t{2}, uint64_t{4});
    auto pipeline = GENERATE(uint64_t{1}, uint64_t{2});
    if (peers + pipeline < 6)
      check_halves({.tensor = peers,
                    .pipeline = pipeline,
                    .replicas = peers,
                    .optimize = optimize,
                    .dropout = dropout});
  }
  SECTION("the same samples") {
    check_halves({.tensor = 2,
                  .optimize = optimize,
                  .same_samples = true,
                  .dropout = dropout});
  }
}

TEST_CASE("a state dict of halves of layers is loaded in slices",
          "[runtime][nn][state]") {
  run_of_halves x{.tensor = 2, .pipeline = 2, .replicas = 2};
  x.optimize = GENERATE("memory", "speed");
  virtual_world_options world;
  world.config = x.config();
  std::mutex mutex;
  std::vector<std::string> wrong;
  halves whole{0.0};
  const auto all = whole->parameters().size();
  run_virtual_world(x.ranks(), world, [&](session&) {
    distributed_model model{seeded([] { return halves{0.0}; })};
    model.partition();
    named_tensors given;
    for (auto& [name, t] : model.state_dict())
      given.emplace_back(name, torch::sin(torch::arange(t.numel()) + 1.0)
                                 .to(t.scalar_type())
                                 .view(t.sizes()));
    model.load_state_dict(given);
    std::map<std::string, Tensor> expected{given.begin(), given.end()};
    auto found = model.state_dict();
    std::unique_lock guard{mutex};
    if (found.size() != all)
      wrong.push_back("not all names");
    for (auto& [name, t] : found)
      if (!torch::equal(t, expected.at(name)))
        wrong.push_back(name);
  });
  CHECK(wrong == std::vector<std::string>{});
}

TEST_CASE("a layer that shall not be shared is not shared by halves",
          "[runtime][nn]") {
  auto shares = GENERATE(true, false);
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.ddp = true;
  world.config.threads = 1;
  std::mutex mutex;
  std::string text;
  run_virtual_world(2, world, [&](session& s) {
    auto made = seeded([] {
      torch::nn::Sequential result;
      result->push_back(
        nn::distributed_transformer_layer(arguments_of_halves(0)));
      return result;
    });
    if (!shares)
      set_tensor_parallelism(*made[0], false);
    distributed_model model{made};
    model.partition();
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      text = model.partition_text();
  });
  CAPTURE(text);
  auto found = text.find("TransformerLayer shared by") != text.npos;
  CHECK(found == shares);
  CHECK_THAT(text, !ContainsSubstring("AttentionLayer")
                     && !ContainsSubstring("TransformerOutputLayer"));
}
