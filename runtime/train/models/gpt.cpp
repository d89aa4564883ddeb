#include "runtime/train/models/gpt.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/nn/layer_row.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/sharing/tp_register.hpp"

#include <torch/nn/functional/activation.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <cmath>

namespace smp {

namespace {

/// @returns [T, T] bool: a token sees the last `window` ones, itself included
torch::Tensor band(int64_t tokens, int64_t window) {
  return torch::ones({tokens, tokens}, torch::kBool).tril().triu(1 - window);
}

/// What tensor-parallel ranks need to share a block as a whole.
transformer_layer_options options_of_gpt_block(const gpt_block_impl& x) {
  transformer_layer_options result;
  auto& attention = *x.attn;
  result.num_attention_heads = attention.heads;
  result.causal = true;
  result.window = attention.window;
  result.activation = [](const torch::Tensor& y) {
    return torch::gelu(y, "tanh");
  };
  result.attention_norm = {"ln_1", x.ln_1->options.eps()};
  result.output_norm = {"ln_2", x.ln_2->options.eps()};
  result.query_key_value = {{"attn.c_attn", true}};
  result.attention_output = {"attn.c_proj", true};
  result.intermediate = {"mlp.c_fc", true};
  result.output = {"mlp.c_proj", true};
  result.attention_dropout = {"attn", attention.dropout};
  result.attention_output_dropout = {"attn.resid_dropout",
                                     attention.resid_dropout->options.p()};
  result.output_dropout = {"mlp.dropout", x.mlp->dropout->options.p()};
  return result;
}

[[maybe_unused]] const bool gpt_block_is_registered = tp_register<
  gpt_block_impl, smp::nn::distributed_transformer_layer>(options_of_gpt_block);

} // namespace

torch::nn::LayerNormOptions norm_options(const gpt_config& x) {
  return torch::nn::LayerNormOptions({x.width}).eps(x.norm_eps);
}

double gpt_residual_std(const gpt_config& x) {
  return gpt_weight_std / std::sqrt(2.0 * static_cast<double>(x.layers));
}

void validate(const gpt_config& x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("model.sequence_length", x.sequence_length);
  require_positive("model.layers", x.layers);
  require_heads(x.width, x.heads);
  require_probability("model.dropout", x.dropout);
}

// -- attention ----------------------------------------------------------------

gpt_attention_impl::gpt_attention_impl(const gpt_config& x, int64_t index)
  : heads(x.heads),
    dropout(x.dropout),
    window(index % 2 == 1 ? x.window : 0),
    c_attn(x.width, 3 * x.width, gpt_weight_std),
    c_proj(x.width, x.width, gpt_residual_std(x)),
    resid_dropout(x.dropout) {
  register_module("c_attn", c_attn);
  register_module("c_proj", c_proj);
  register_module("resid_dropout", resid_dropout);
}

torch::Tensor gpt_attention_impl::forward(torch::Tensor x) {
  const auto b = x.size(0), t = x.size(1), c = x.size(2);
  auto qkv = c_attn(x).view({b, t, 3, heads, c / heads});
  // [B, heads, T, C / heads] each
  auto part = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };
  const bool banded = window > 0 && window < t;
  auto y = torch::scaled_dot_product_attention(
    part(0), part(1), part(2),
    banded ? std::optional{band(t, window)} : std::nullopt,
    is_training() ? dropout : 0.0, /*is_causal=*/!banded);
  return resid_dropout(c_proj(merge_heads(y)));
}

// -- feed-forward -------------------------------------------------------------

gpt_mlp_impl::gpt_mlp_impl(const gpt_config& x)
  : act(torch::nn::GELUOptions().approximate("tanh")), dropout(x.dropout) {
  const auto inner = x.feed_forward > 0 ? x.feed_forward : 4 * x.width;
  c_fc = submodule<conv1d>(x.width, inner, gpt_weight_std);
  c_proj = submodule<conv1d>(inner, x.width, gpt_residual_std(x));
  register_module("c_fc", c_fc);
  register_module("act", act);
  register_module("c_proj", c_proj);
  register_module("dropout", dropout);
}

torch::Tensor gpt_mlp_impl::forward(torch::Tensor x) {
  return dropout(c_proj(act(c_fc(x))));
}

// -- block --------------------------------------------------------------------

gpt_block_impl::gpt_block_impl(const gpt_config& x, int64_t index)
  : ln_1(norm_options(x)), attn(x, index), ln_2(norm_options(x)), mlp(x) {
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
    h->push_back(gpt_block(x, i));
  register_module("h", h);
  register_module("ln_f", ln_f);
  torch::nn::init::normal_(wte->weight, 0, gpt_weight_std);
  torch::nn::init::normal_(wpe->weight, 0, gpt_weight_std);
}

torch::Tensor gpt_transformer_impl::forward(torch::Tensor tokens) {
  auto positions = torch::arange(tokens.size(1), tokens.options());
  auto x = drop(wte(tokens) + wpe(positions));
  return ln_f(nn::run_in_row<torch::Tensor>(h, x));
}

// -- the whole ----------------------------------------------------------------

gpt_impl::gpt_impl(const gpt_config& x) {
  validate(x);
  transformer = submodule<gpt_transformer>(x);
  auto weight = x.tied ? transformer->wte->weight
                       : normal_tensor({x.vocabulary, x.width}, gpt_weight_std);
  if (SMP_FAULT("untied-weight"))
    weight = weight.detach().clone();
  register_module("transformer", transformer);
  lm_head.emplace(*this, weight, x.loss_in_head);
}

torch::Tensor gpt_impl::forward(torch::Tensor tokens) {
  return lm_head->logits(transformer(tokens));
}

torch::Tensor gpt_impl::loss(torch::Tensor tokens, torch::Tensor targets) {
  return lm_head->loss(transformer(tokens), targets);
}

} // namespace smp
