#include "tests/support/catch.hpp"

#include "runtime/nn/layers.hpp"
#include "smp/nn.hpp"
#include "tests/support/torch/numbers.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <string>
#include <vector>

// The norms of a layer (smp.nn), before its parts, behind them, both or none:
// against the formula.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 24;
constexpr int64_t samples = 3;
constexpr int64_t tokens = 5;
constexpr int64_t seen = 7; // of what is attended to

Tensor linear(const Tensor& x, torch::nn::LinearImpl& p) {
  return x.matmul(p.weight.t()) + p.bias;
}

/// @param mask added to scores
Tensor attended(nn::distributed_attention_layer_impl& p, const Tensor& x,
                const Tensor& context, const Tensor& mask) {
  auto by_heads = [](const Tensor& y) {
    return y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
  };
  auto scores = by_heads(linear(x, *p.query))
                  .matmul(by_heads(linear(context, *p.key)).transpose(2, 3))
                / std::sqrt(static_cast<double>(width / heads));
  auto y = torch::softmax(scores + mask, -1)
             .matmul(by_heads(linear(context, *p.value)));
  return linear(y.transpose(1, 2).flatten(2), *p.dense);
}

Tensor normed(torch::nn::LayerNormImpl& p, const Tensor& x) {
  auto off = x - x.mean(-1, true);
  return off / (off.square().mean(-1, true) + 1e-5).sqrt() * p.weight + p.bias;
}

/// What the formula makes of a part of a layer.
template <class Part, class F>
Tensor with_norms(Part& p, const Tensor& x, F f) {
  auto pre = p.arguments.pre_layernorm, post = p.arguments.post_layernorm;
  if (pre && post)
    return normed(*p.post_layernorm, x + f(normed(*p.layernorm, x)));
  if (pre)
    return x + f(normed(*p.layernorm, x));
  return post ? normed(*p.layernorm, x + f(x)) : x + f(x);
}

/// What a loss of `y` gives to inputs and to parameters, by name.
numbers gradients_of(torch::nn::Module& x, const Tensor& y,
                     const std::vector<Tensor>& inputs) {
  x.zero_grad();
  y.sin().sum().backward();
  numbers result;
  for (auto& p : x.named_parameters())
    result.emplace(p.key(), p.value().grad());
  for (size_t i = 0; i < inputs.size(); ++i)
    result.emplace("input" + std::to_string(i), inputs[i].grad());
  return result;
}

Tensor same(const Tensor& x) {
  return x.detach().clone().requires_grad_();
}

} // namespace

TEST_CASE("a layer has those norms that its arguments name", "[runtime][nn]") {
  auto pre = GENERATE(true, false);
  auto post = GENERATE(true, false);
  auto type = GENERATE(torch::kFloat, torch::kDouble);
  CAPTURE(pre, post, type);
  nn::transformer_layer_arguments arguments;
  arguments.num_attention_heads = heads;
  arguments.attention_head_size = width / heads;
  arguments.hidden_size = width;
  arguments.intermediate_size = 40;
  arguments.attention_dropout_prob = arguments.hidden_dropout_prob = 0;
  arguments.causal_mask_size = tokens;
  arguments.add_cross_attention = true;
  arguments.pre_layernorm = pre;
  arguments.post_layernorm = post;
  torch::manual_seed(17);
  nn::distributed_transformer_layer layer{arguments};
  layer->to(type);
  size_t norms = 0;
  for (auto& p : layer->named_parameters())
    if (p.key().find("layernorm.") != std::string::npos) {
      torch::NoGradGuard no_grad;
      p.value().normal_(1, 0.2); // else all begin alike
      ++norms;
    }
  CHECK(norms == 3 * 2 * (size_t{pre} + size_t{post}));

  auto leaf_of = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, type).requires_grad_();
  };
  auto x = leaf_of({samples, tokens, width}), y = same(x);
  auto context = leaf_of({samples, seen, width}), shown = same(context);
  auto mask = torch::randn({samples, 1, 1, seen}, type);
  auto h = with_norms(*layer->attention, x, [&](const Tensor& z) {
    return attended(*layer->attention, z, z, causal_bias(tokens));
  });
  h = with_norms(*layer->crossattention, h, [&](const Tensor& z) {
    return attended(*layer->crossattention, z, context, mask);
  });
  auto expected = with_norms(*layer->output, h, [&](const Tensor& z) {
    return linear(torch::gelu(linear(z, *layer->output->dense1)),
                  *layer->output->dense2);
  });
  auto wanted = gradients_of(*layer, expected, {x, context});
  auto none = torch::zeros({1, 1, 1, tokens}, type);
  auto result = layer(nn::layer_states{y, none, shown, mask}).at(0);
  auto allowed = type == torch::kDouble
                   ? closeness{.share = 1e-11, .least = 1e-11}
                   : closeness{.least = 1e-5};
  check_near({{"result", result.detach()}}, {{"result", expected.detach()}},
             allowed);
  check_near(gradients_of(*layer, result, {y, shown}), wanted, allowed);
}
