#pragma once

#include "tests/simulated/backend/fallback.hpp"

#include <optional>
#include <tuple>

// Torch takes the device for one with libraries of its own, so it asks for some
// operators that the CPU does not have.

namespace smp::sim {

void convolution(const c10::OperatorHandle&, value_stack*);

void convolution_backward(const c10::OperatorHandle&, value_stack*);

/// The CPU's fused kernel draws from the host's generator inside.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor&, double p,
                                                  std::optional<bool> train);

// Cells are made of operators above autograd, so that nobody asks for the fused
// backward; the last tensor, which only that wants, is undefined.

/// @returns hidden state, cell state
std::tuple<at::Tensor, at::Tensor, at::Tensor>
lstm_cell(const at::Tensor& in_gates, const at::Tensor& hidden_gates,
          const at::Tensor& cell, const std::optional<at::Tensor>& in_bias,
          const std::optional<at::Tensor>& hidden_bias);

/// @returns hidden state
std::tuple<at::Tensor, at::Tensor>
gru_cell(const at::Tensor& in_gates, const at::Tensor& hidden_gates,
         const at::Tensor& hidden, const std::optional<at::Tensor>& in_bias,
         const std::optional<at::Tensor>& hidden_bias);

} // namespace smp::sim
