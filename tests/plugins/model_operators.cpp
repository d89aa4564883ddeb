// What a library of model.operator_libraries brings, for tests: an operator
// beside LibTorch's, which the file tests/data/script/outside_operator.pt
// calls, and hooks for a class of files.

#include "runtime/sharing/tp_register.hpp"
#include "smp/nn.hpp"

#include <ATen/TensorOperators.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/library.h>

namespace model_operators {

namespace {

at::Tensor twice(const at::Tensor& x) {
  return 2 * x;
}

} // namespace

TORCH_LIBRARY(smp_test, m) {
  m.def("twice(Tensor x) -> Tensor", twice);
}

[[maybe_unused]] const bool registered = smp::tp_register<
  smp::nn::distributed_linear>(
  "own_package.layers.Scaled",
  [](const torch::jit::Module&) { return smp::linear_options{}; },
  [](const at::Tensor& x, double scale) { return x * scale; });

} // namespace model_operators
