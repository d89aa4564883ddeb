#pragma once

// The GPT of runtime/train/models/gpt.hpp, operation by operation, with
// torch::nn alone: what one process without smp runs.

#include <torch/nn/functional/activation.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

namespace smp::bench {

struct gpt_sizes {
  int64_t vocabulary = 256;
  int64_t length = 128; // T
  int64_t layers = 8;
  int64_t heads = 4;
  int64_t width = 256; // C
};

/// x W + b with W: [in, out], as GPT-2 has it.
struct plain_affine_impl : torch::nn::Module {
  plain_affine_impl(int64_t in, int64_t out)
    : weight(register_parameter("weight", 0.02 * torch::randn({in, out}))),
      bias(register_parameter("bias", torch::zeros({out}))) {
    // nop
  }

  /// x: [B, T, in] @returns [B, T, out]
  torch::Tensor forward(torch::Tensor x) {
    return torch::addmm(bias, x.flatten(0, 1), weight)
      .view({x.size(0), x.size(1), -1});
  }

  torch::Tensor weight, bias;
};
TORCH_MODULE_IMPL(plain_affine, plain_affine_impl);

struct plain_block_impl : torch::nn::Module {
  explicit plain_block_impl(const gpt_sizes& x)
    : heads(x.heads),
      ln_1(torch::nn::LayerNormOptions({x.width})),
      ln_2(torch::nn::LayerNormOptions({x.width})),
      c_attn(x.width, 3 * x.width),
      attn_proj(x.width, x.width),
      c_fc(x.width, 4 * x.width),
      mlp_proj(4 * x.width, x.width) {
    register_module("ln_1", ln_1);
    register_module("c_attn", c_attn);
    register_module("attn_proj", attn_proj);
    register_module("ln_2", ln_2);
    register_module("c_fc", c_fc);
    register_module("mlp_proj", mlp_proj);
  }

  /// x: [B, T, C] @returns [B, T, C]
  torch::Tensor forward(torch::Tensor x) {
    const auto b = x.size(0), t = x.size(1), c = x.size(2);
    auto qkv = c_attn(ln_1(x)).view({b, t, 3, heads, c / heads});
    auto part = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };
    auto y = torch::scaled_dot_product_attention(part(0), part(1), part(2), {},
                                                 0.0, /*is_causal=*/true);
    x = x + attn_proj(y.transpose(1, 2).reshape({b, t, c}));
    return x + mlp_proj(torch::gelu(c_fc(ln_2(x)), "tanh"));
  }

  int64_t heads;
  torch::nn::LayerNorm ln_1, ln_2;
  plain_affine c_attn, attn_proj, c_fc, mlp_proj;
};
TORCH_MODULE_IMPL(plain_block, plain_block_impl);

struct plain_gpt_impl : torch::nn::Module {
  explicit plain_gpt_impl(const gpt_sizes& x)
    : wte(x.vocabulary, x.width),
      wpe(x.length, x.width),
      ln_f(torch::nn::LayerNormOptions({x.width})),
      lm_head(torch::nn::LinearOptions(x.width, x.vocabulary).bias(false)) {
    register_module("wte", wte);
    register_module("wpe", wpe);
    for (int64_t i = 0; i < x.layers; ++i)
      h->push_back(plain_block(x));
    register_module("h", h);
    register_module("ln_f", ln_f);
    register_module("lm_head", lm_head);
  }

  /// tokens: [B, T] @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens) {
    auto x = wte(tokens) + wpe(torch::arange(tokens.size(1), tokens.options()));
    return lm_head(ln_f(h->forward(x)));
  }

  torch::nn::Embedding wte, wpe;
  torch::nn::Sequential h;
  torch::nn::LayerNorm ln_f;
  torch::nn::Linear lm_head;
};
TORCH_MODULE_IMPL(plain_gpt, plain_gpt_impl);

} // namespace smp::bench
