#include "tests/support/torch/plain_gpt.hpp"

#include "tests/support/torch/random.hpp"

#include <torch/nn/functional/activation.h>
#include <torch/types.h>

namespace smp::test {

namespace nn = torch::nn;

plain_gpt::affine::affine(int64_t in, int64_t out)
  : weight(register_parameter("weight", torch::randn({in, out}))),
    bias(register_parameter("bias", torch::randn({out}))) {
  // nop
}

torch::Tensor plain_gpt::affine::operator()(const torch::Tensor& x) const {
  return torch::matmul(x, weight) + bias;
}

plain_gpt::block::block(int64_t width, int64_t heads, double dropout,
                        std::string name)
  : heads(heads),
    dropout(dropout),
    name(std::move(name)),
    ln_1(nn::LayerNormOptions({width})),
    ln_2(nn::LayerNormOptions({width})),
    c_attn(std::make_shared<affine>(width, 3 * width)),
    attn_proj(std::make_shared<affine>(width, width)),
    c_fc(std::make_shared<affine>(width, 4 * width)),
    mlp_proj(std::make_shared<affine>(4 * width, width)),
    attn_drop(dropout),
    mlp_drop(dropout) {
  register_module("ln_1", ln_1);
  register_module("c_attn", c_attn);
  register_module("attn_proj", attn_proj);
  register_module("attn_drop", attn_drop);
  register_module("ln_2", ln_2);
  register_module("c_fc", c_fc);
  register_module("mlp_proj", mlp_proj);
  register_module("mlp_drop", mlp_drop);
}

torch::Tensor plain_gpt::block::forward(torch::Tensor x) {
  auto b = x.size(0), t = x.size(1), c = x.size(2);
  auto qkv = (*c_attn)(ln_1(x)).view({b, t, 3, heads, c / heads});
  auto q = qkv.select(2, 0).transpose(1, 2);
  auto k = qkv.select(2, 1).transpose(1, 2);
  auto v = qkv.select(2, 2).transpose(1, 2);
  named_call call{name};
  x = x + attention(q, k, v);
  auto f = nn::functional::gelu(
    (*c_fc)(ln_2(x)), nn::functional::GELUFuncOptions().approximate("tanh"));
  named_call mlp{name + ".mlp"};
  named_call drop{name + ".mlp.dropout"};
  return x + mlp_drop((*mlp_proj)(f));
}

torch::Tensor plain_gpt::block::attention(const torch::Tensor& q,
                                          const torch::Tensor& k,
                                          const torch::Tensor& v) {
  named_call call{name + ".attn"};
  auto y = torch::scaled_dot_product_attention(
    q, k, v, {}, is_training() ? dropout : 0.0, true);
  y = (*attn_proj)(y.transpose(1, 2).flatten(2));
  named_call drop{name + ".attn.resid_dropout"};
  return attn_drop(y);
}

plain_gpt::plain_gpt(int64_t vocabulary, int64_t length, int64_t layers,
                     int64_t heads, int64_t width, double dropout)
  : wte(vocabulary, width),
    wpe(length, width),
    drop(dropout),
    ln_f(nn::LayerNormOptions({width})),
    lm_head(nn::LinearOptions(width, vocabulary).bias(false)) {
  register_module("wte", wte);
  register_module("wpe", wpe);
  register_module("drop", drop);
  for (int64_t i = 0; i < layers; ++i)
    h.push_back(register_module(
      "h" + std::to_string(i),
      std::make_shared<block>(width, heads, dropout,
                              "transformer.h." + std::to_string(i))));
  register_module("ln_f", ln_f);
  register_module("lm_head", lm_head);
}

torch::Tensor plain_gpt::forward(torch::Tensor tokens) {
  named_call call{"transformer"};
  auto x = wte(tokens) + wpe(torch::arange(tokens.size(1), tokens.options()));
  {
    named_call dropped{"transformer.drop"};
    x = drop(x);
  }
  for (auto& layer : h)
    x = layer->forward(x);
  return lm_head(ln_f(x));
}

std::map<std::string, torch::Tensor> plain_gpt::named() const {
  std::map<std::string, torch::Tensor> result;
  auto add = [&result](const std::string& prefix, const nn::Module& m) {
    for (auto& p : m.named_parameters())
      result.emplace(prefix + "." + p.key(), p.value());
  };
  add("transformer.wte", *wte);
  add("transformer.wpe", *wpe);
  for (size_t i = 0; i < h.size(); ++i) {
    auto prefix = "transformer.h." + std::to_string(i);
    add(prefix + ".ln_1", *h[i]->ln_1);
    add(prefix + ".attn.c_attn", *h[i]->c_attn);
    add(prefix + ".attn.c_proj", *h[i]->attn_proj);
    add(prefix + ".ln_2", *h[i]->ln_2);
    add(prefix + ".mlp.c_fc", *h[i]->c_fc);
    add(prefix + ".mlp.c_proj", *h[i]->mlp_proj);
  }
  add("transformer.ln_f", *ln_f);
  add("lm_head", *lm_head);
  return result;
}

double excess(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes())
    return 1e30;
  auto difference = (a - b).abs().max().item<double>();
  auto bound = 1e-5 * b.abs().max().item<double>() + 1e-7;
  // NaN must not pass.
  return difference <= bound ? difference - bound
                             : std::max(difference - bound, 1e-30);
}

} // namespace smp::test
