#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace smp::nn {

/// How the B samples of this peer become the N samples of all peers, which are
/// the same with `smp.prescaled_batch`.
enum class entry : uint8_t {
  gather,   // [B, ..., n] -> [N, ..., n]: all channels
  exchange, // [B, ..., T n] -> [N, ..., n]: the channels of this rank
  done      // [N, ..., n]: already exchanged
};

/// Linears of which this rank holds a part, on the samples X of all peers: y_i
/// = X W_i^T + b_i. Some samples travel while others are multiplied; in
/// backward the gradient of X travels back while those of weights and biases
/// are computed.
/// @param weights [out_i, n] each
/// @param biases [out_i] each, or undefined; empty if another peer adds it, so
/// that results require grad on all peers even if only biases train
/// @returns [N, ..., out_i] each
std::vector<at::Tensor> linears_for_tp(const at::Tensor& x, entry how,
                                       std::span<const at::Tensor> weights,
                                       std::span<const at::Tensor> biases);

/// One of them, whose results peers add up; each gets those of its samples.
/// They travel while the next ones are computed, and so do gradients.
/// @param bias empty or undefined if another peer adds it, or if there is none
/// @returns [B, ..., out]
at::Tensor scattered_linear_for_tp(const at::Tensor& x, entry how,
                                   const at::Tensor& weight,
                                   const at::Tensor& bias);

/// Linears of which this rank holds some inputs, on the samples X of all
/// peers: y_i = X W_i^T + b_i, of whose sum each peer gets a part. The result
/// of one, or of some samples, travels while the next is computed, and so do
/// gradients.
/// @param x [N, ..., n], the channels of this rank
/// @param weights [T blocks out_i, n] each
/// @param biases [T blocks out_i] each, or undefined; empty if another peer
/// adds it
/// @param blocks of outputs, each of which is split among peers
/// @returns [N, ..., blocks out_i] each
std::vector<at::Tensor>
reduced_linears_for_tp(const at::Tensor& x, std::span<const at::Tensor> weights,
                       std::span<const at::Tensor> biases, int64_t blocks);

} // namespace smp::nn
