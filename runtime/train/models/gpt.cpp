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
torch::Tensor band(int64_t tokens, int64_t window, torch::Device device) {
  return torch::ones({tokens, tokens},
                     torch::TensorOptions{torch::kBool}.device(device))
    .tril()
    .triu(1 - window);
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

double gpt_residual_std(const model_sizes& x) {
  return gpt_weight_std / std::sqrt(2.0 * static_cast<double>(x.layers));
}

// -- attention ----------------------------------------------------------------

gpt_attention_impl::gpt_attention_impl(const model_sizes& x, int64_t index)
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
    banded ? std::optional{band(t, window, x.device())} : std::nullopt,
    is_training() ? dropout : 0.0, /*is_causal=*/!banded);
  return resid_dropout(c_proj(merge_heads(y)));
}

// -- feed-forward -------------------------------------------------------------

gpt_mlp_impl::gpt_mlp_impl(const model_sizes& x)
  : act(torch::nn::GELUOptions().approximate("tanh")), dropout(x.dropout) {
  const auto inner = inner_width(x);
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

gpt_block_impl::gpt_block_impl(const model_sizes& x, int64_t index)
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

torch::Tensor gpt_transformer_impl::forward(torch::Tensor tokens) {
  return ln_f(nn::run_in_row<torch::Tensor>(h, embedded(tokens)));
}

// -- the whole ----------------------------------------------------------------

gpt_impl::gpt_impl(const model_sizes& x) {
  require_transformer(x);
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
