#include "runtime/nn/layers.hpp"

#include "runtime/sharing/tp_register.hpp"

#include <torch/nn/functional/linear.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>

#include <limits>

namespace smp {

namespace {

[[maybe_unused]] const bool registered = tp_register<conv1d_impl>("Conv1D")
                                         && tp_register<tied_linear_impl>(
                                           "Linear");

} // namespace

// -- modules ------------------------------------------------------------------

conv1d_impl::conv1d_impl(int64_t in, int64_t out, double std)
  : weight(register_parameter("weight", normal_tensor({in, out}, std))),
    bias(register_parameter("bias", torch::zeros({out}))) {
  // nop
}

torch::Tensor conv1d_impl::forward(torch::Tensor x) {
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  return torch::addmm(bias, x.reshape({-1, x.size(-1)}), weight).view(sizes);
}

tied_linear_impl::tied_linear_impl(torch::Tensor w, torch::Tensor b) {
  weight = register_parameter("weight", std::move(w));
  if (b.defined())
    bias = register_parameter("bias", std::move(b));
}

torch::Tensor tied_linear_impl::forward(torch::Tensor x) {
  return bias.defined() ? torch::nn::functional::linear(x, weight, bias)
                        : torch::nn::functional::linear(x, weight);
}

rms_norm_impl::rms_norm_impl(int64_t width, double eps)
  : weight(register_parameter("weight", torch::ones({width}))), eps(eps) {
  // nop
}

torch::Tensor rms_norm_impl::forward(torch::Tensor x) {
  // Computes at least in float32, also for half precision.
  auto y = x.scalar_type() == torch::kDouble ? x : x.to(torch::kFloat);
  auto mean_square = y.pow(2).mean(-1, /*keepdim=*/true);
  auto scaled = x * torch::rsqrt(mean_square + eps);
  return weight * scaled.to(weight.scalar_type());
}

// -- attention ----------------------------------------------------------------

torch::Tensor split_heads(const torch::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

torch::Tensor merge_heads(const torch::Tensor& x) {
  return x.transpose(1, 2).flatten(2);
}

torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                     const torch::Tensor& v, const torch::Tensor& bias,
                     double scale, double dropout) {
  auto scores = torch::matmul(q, k.transpose(2, 3));
  if (scale != 1)
    scores = scores * scale;
  auto weights = torch::softmax(scores + bias, -1);
  if (dropout > 0)
    weights = torch::dropout(weights, dropout, /*train=*/true);
  return torch::matmul(weights, v);
}

torch::Tensor padding_bias(const torch::Tensor& mask) {
  auto hidden = mask.to(torch::kBool).logical_not().unsqueeze(1).unsqueeze(1);
  return torch::zeros(hidden.sizes(),
                      torch::TensorOptions{}.device(hidden.device()))
    .masked_fill(hidden, std::numeric_limits<float>::lowest());
}

torch::Tensor causal_bias(int64_t tokens, torch::Device device) {
  return torch::full({1, 1, tokens, tokens},
                     std::numeric_limits<float>::lowest(),
                     torch::TensorOptions{}.device(device))
    .triu(1);
}

// -- loss ---------------------------------------------------------------------

torch::Tensor token_loss(const torch::Tensor& logits,
                         const torch::Tensor& targets) {
  // -100 is LibTorch's default for targets to ignore.
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              targets.flatten());
}

// -- initial values -----------------------------------------------------------

void init_linear(torch::nn::LinearImpl& x, double std) {
  torch::nn::init::normal_(x.weight, 0, std);
  if (x.bias.defined())
    torch::nn::init::zeros_(x.bias);
}

torch::Tensor normal_tensor(torch::IntArrayRef sizes, double std) {
  auto result = torch::empty(sizes);
  torch::nn::init::normal_(result, 0, std);
  return result;
}

} // namespace smp
