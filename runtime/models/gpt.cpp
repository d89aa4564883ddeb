#include "runtime/models/gpt.hpp"

#include "runtime/models/sizes.hpp"

#include <torch/nn/functional/linear.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <cmath>

namespace nn = torch::nn;

namespace smp {

namespace {

/// Standard deviation of all weights (GPT-2).
constexpr double weight_std = 0.02;

nn::LayerNormOptions norm_options(const gpt_config& x) {
  return nn::LayerNormOptions({x.width});
}

/// Layers whose output is added to the residual stream begin smaller, so that
/// the stream's variance does not grow with depth (GPT-2).
double residual_std(const gpt_config& x) {
  return weight_std / std::sqrt(2.0 * static_cast<double>(x.layers));
}

void init_linear(nn::LinearImpl& x, double std) {
  nn::init::normal_(x.weight, 0, std);
  nn::init::zeros_(x.bias);
}

} // namespace

void validate(const gpt_config& x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("model.sequence_length", x.sequence_length);
  require_positive("model.layers", x.layers);
  require_positive("model.heads", x.heads);
  require_positive("model.width", x.width);
  if (x.width % x.heads != 0)
    throw error{error_code::config,
                fmt::format("model.width ({}) must be a multiple of "
                            "model.heads ({})",
                            x.width, x.heads)};
  if (!(x.dropout >= 0 && x.dropout < 1))
    throw error{error_code::config,
                fmt::format("model.dropout is {}, must be at least 0 and "
                            "less than 1",
                            x.dropout)};
}

// -- attention ----------------------------------------------------------------

gpt_attention_impl::gpt_attention_impl(const gpt_config& x)
  : heads(x.heads),
    dropout(x.dropout),
    c_attn(x.width, 3 * x.width),
    c_proj(x.width, x.width),
    resid_dropout(x.dropout) {
  register_module("c_attn", c_attn);
  register_module("c_proj", c_proj);
  register_module("resid_dropout", resid_dropout);
  init_linear(*c_attn, weight_std);
  init_linear(*c_proj, residual_std(x));
}

torch::Tensor gpt_attention_impl::forward(torch::Tensor x) {
  const auto b = x.size(0), t = x.size(1), c = x.size(2);
  auto qkv = c_attn(x).view({b, t, 3, heads, c / heads});
  // [B, heads, T, C / heads] each
  auto part = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };
  auto y = torch::scaled_dot_product_attention(
    part(0), part(1), part(2), {}, is_training() ? dropout : 0.0,
    /*is_causal=*/true);
  y = y.transpose(1, 2).reshape({b, t, c});
  return resid_dropout(c_proj(y));
}

// -- feed-forward -------------------------------------------------------------

gpt_mlp_impl::gpt_mlp_impl(const gpt_config& x)
  : c_fc(x.width, 4 * x.width),
    act(nn::GELUOptions().approximate("tanh")),
    c_proj(4 * x.width, x.width),
    dropout(x.dropout) {
  register_module("c_fc", c_fc);
  register_module("act", act);
  register_module("c_proj", c_proj);
  register_module("dropout", dropout);
  init_linear(*c_fc, weight_std);
  init_linear(*c_proj, residual_std(x));
}

torch::Tensor gpt_mlp_impl::forward(torch::Tensor x) {
  return dropout(c_proj(act(c_fc(x))));
}

// -- block --------------------------------------------------------------------

gpt_block_impl::gpt_block_impl(const gpt_config& x)
  : ln_1(norm_options(x)),
    attn(x),
    ln_2(norm_options(x)),
    mlp(x) {
  register_module("ln_1", ln_1);
  register_module("attn", attn);
  register_module("ln_2", ln_2);
  register_module("mlp", mlp);
}

torch::Tensor gpt_block_impl::forward(torch::Tensor x) {
  x = x + attn(ln_1(x));
  return x + mlp(ln_2(x));
}

// -- transformer --------------------------------------------------------------

gpt_transformer_impl::gpt_transformer_impl(const gpt_config& x)
  : wte(x.vocabulary, x.width),
    wpe(x.sequence_length, x.width),
    drop(x.dropout),
    ln_f(norm_options(x)) {
  register_module("wte", wte);
  register_module("wpe", wpe);
  register_module("drop", drop);
  for (int64_t i = 0; i < x.layers; ++i)
    h->push_back(gpt_block(x));
  register_module("h", h);
  register_module("ln_f", ln_f);
  nn::init::normal_(wte->weight, 0, weight_std);
  nn::init::normal_(wpe->weight, 0, weight_std);
}

torch::Tensor gpt_transformer_impl::forward(torch::Tensor tokens) {
  auto positions = torch::arange(tokens.size(1), tokens.options());
  auto x = drop(wte(tokens) + wpe(positions));
  return ln_f(h->forward(x));
}

// -- the whole ----------------------------------------------------------------

gpt_head_impl::gpt_head_impl(torch::Tensor x) {
  weight = register_parameter("weight", std::move(x));
}

torch::Tensor gpt_head_impl::forward(torch::Tensor x) {
  return nn::functional::linear(x, weight);
}

gpt_impl::gpt_impl(const gpt_config& x) {
  validate(x);
  transformer = submodule<gpt_transformer>(x);
  auto weight = transformer->wte->weight;
  if (!x.tied) {
    weight = torch::empty({x.vocabulary, x.width});
    nn::init::normal_(weight, 0, weight_std);
  }
  lm_head = submodule<gpt_head>(weight);
  register_module("transformer", transformer);
  register_module("lm_head", lm_head);
}

torch::Tensor gpt_impl::forward(torch::Tensor tokens) {
  return lm_head(transformer(tokens));
}

} // namespace smp
