#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp::test {

/// The quickstart's architecture written with torch::nn alone (R36): it shares
/// no line with runtime/, so that it can tell whether those numbers are right.
/// Parameters have the same names, and so have the calls that draw.
struct plain_gpt : torch::nn::Module {
  /// x W + b with W: [in, out], as GPT-2 has it.
  struct affine : torch::nn::Module {
    affine(int64_t in, int64_t out);
    torch::Tensor operator()(const torch::Tensor& x) const;
    torch::Tensor weight, bias;
  };

  struct block : torch::nn::Module {
    block(int64_t width, int64_t heads, double dropout, std::string name);
    torch::Tensor forward(torch::Tensor x);
    torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                            const torch::Tensor& v);
    int64_t heads;
    double dropout;
    std::string name; // in the distributed model
    torch::nn::LayerNorm ln_1, ln_2;
    std::shared_ptr<affine> c_attn, attn_proj, c_fc, mlp_proj;
    torch::nn::Dropout attn_drop, mlp_drop;
  };

  plain_gpt(int64_t vocabulary, int64_t length, int64_t layers, int64_t heads,
            int64_t width, double dropout);

  /// tokens: [B, T] @returns logits [B, T, V]
  torch::Tensor forward(torch::Tensor tokens);

  /// Parameters by the names of the distributed model.
  std::map<std::string, torch::Tensor> named() const;

  torch::nn::Embedding wte, wpe;
  torch::nn::Dropout drop;
  std::vector<std::shared_ptr<block>> h;
  torch::nn::LayerNorm ln_f;
  torch::nn::Linear lm_head;
};

/// R35: max|a - b| <= 1e-5 max|b| + 1e-7.
/// @returns the largest excess over the bound, at most 0 if they agree
double excess(const torch::Tensor& a, const torch::Tensor& b);

} // namespace smp::test
