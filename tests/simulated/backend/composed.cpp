#include "tests/simulated/backend/composed.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

namespace smp::sim {

namespace {

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

at::Tensor with_bias(const at::Tensor& x,
                     const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? x + *bias : x;
}

} // namespace

void convolution(const c10::OperatorHandle&, value_stack* stack) {
  static const auto op = operator_named("aten::convolution");
  fallback(op, stack);
}

void convolution_backward(const c10::OperatorHandle& asked,
                          value_stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  // That wants the size of the bias as well.
  auto number = static_cast<std::ptrdiff_t>(asked.schema().arguments().size());
  auto first = stack->end() - number;
  std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, c10::IValue{bias_sizes});
  fallback(op, stack);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p,
                                                  std::optional<bool> train) {
  auto flags = x.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0)
    return {x.clone(), at::ones_like(x, flags)};
  auto mask = at::empty_like(x, flags).bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
lstm_cell(const at::Tensor& in_gates, const at::Tensor& hidden_gates,
          const at::Tensor& cell, const std::optional<at::Tensor>& in_bias,
          const std::optional<at::Tensor>& hidden_bias) {
  auto gates = with_bias(hidden_gates, hidden_bias)
               + with_bias(in_gates, in_bias);
  auto parts = gates.chunk(4, 1);
  auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, at::Tensor{}};
}

std::tuple<at::Tensor, at::Tensor>
gru_cell(const at::Tensor& in_gates, const at::Tensor& hidden_gates,
         const at::Tensor& hidden, const std::optional<at::Tensor>& in_bias,
         const std::optional<at::Tensor>& hidden_bias) {
  auto in = with_bias(in_gates, in_bias).chunk(3, 1);
  auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (of_hidden[0] + in[0]).sigmoid();
  auto update = (of_hidden[1] + in[1]).sigmoid();
  auto fresh = (in[2] + of_hidden[2] * reset).tanh();
  return {(hidden - fresh) * update + fresh, at::Tensor{}};
}

} // namespace smp::sim
