#pragma once

// What several built-in models use and torch::nn does not have.
//
// Shapes: B sequences per (micro)batch, T tokens, C = width, H heads,
// D = width of a head.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace smp {

// -- modules ------------------------------------------------------------------

/// x W + b, with W as the files of GPT-2 hold it: [in, out], the transpose of
/// a Linear's (Hugging Face: Conv1D).
struct conv1d_impl : torch::nn::Module {
  /// @param std of the initial weights; the bias begins at 0
  conv1d_impl(int64_t in, int64_t out, double std);

  /// x: [B, T, in] @returns [B, T, out]
  torch::Tensor forward(torch::Tensor x);

  torch::Tensor weight; // [in, out]
  torch::Tensor bias;   // [out]
};
TORCH_MODULE_IMPL(conv1d, conv1d_impl);

/// A Linear whose weight, and bias if there is one, may be parameters of other
/// modules too (the same objects).
struct tied_linear_impl : torch::nn::Module {
  /// weight: [out, in], bias: [out] or undefined
  explicit tied_linear_impl(torch::Tensor weight, torch::Tensor bias = {});

  /// x: [..., in] @returns [..., out]
  torch::Tensor forward(torch::Tensor x);

  torch::Tensor weight;
  torch::Tensor bias;
};
TORCH_MODULE_IMPL(tied_linear, tied_linear_impl);

/// Scales each vector to a mean square of 1 (Zhang and Sennrich 2019): a layer
/// norm without mean and bias.
struct rms_norm_impl : torch::nn::Module {
  rms_norm_impl(int64_t width, double eps);

  /// x: [..., C] @returns [..., C]
  torch::Tensor forward(torch::Tensor x);

  torch::Tensor weight; // [C]
  double eps;
};
TORCH_MODULE_IMPL(rms_norm, rms_norm_impl);

// -- attention ----------------------------------------------------------------

/// x: [B, T, H * D] @returns [B, H, T, D], a view
torch::Tensor split_heads(const torch::Tensor& x, int64_t heads);

/// x: [B, H, T, D] @returns [B, T, H * D]
torch::Tensor merge_heads(const torch::Tensor& x);

/// softmax(scale q k^T + bias) v, with dropout on the weights.
/// q: [B, H, T, D]; k, v: [B, H, S, D]; bias: broadcast to [B, H, T, S]
/// @param dropout probability, 0 outside of training
/// @returns [B, H, T, D]
torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                     const torch::Tensor& v, const torch::Tensor& bias,
                     double scale, double dropout);

/// What `attend` adds so that padding gets no weight.
/// mask: [B, S], 1 for tokens and 0 for padding
/// @returns [B, 1, 1, S] float32: 0, or the lowest number
torch::Tensor padding_bias(const torch::Tensor& mask);

/// What `attend` adds so that a token sees no later one.
/// @returns [1, 1, T, T] float32
torch::Tensor causal_bias(int64_t tokens, torch::Device device = torch::kCPU);

// -- loss ---------------------------------------------------------------------

/// Mean cross entropy in nat over the tokens whose target is not -100.
/// logits: [B, T, V], targets: [B, T] int64
torch::Tensor token_loss(const torch::Tensor& logits,
                         const torch::Tensor& targets);

// -- initial values -----------------------------------------------------------

/// Normal weights and a bias of 0.
void init_linear(torch::nn::LinearImpl& x, double std);

/// @returns the initial values of a parameter, normal with this deviation
torch::Tensor normal_tensor(torch::IntArrayRef sizes, double std);

} // namespace smp
