// An operator beside LibTorch's, for tests: the file
// tests/data/script/outside_operator.pt calls it.

#include <ATen/TensorOperators.h>
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

} // namespace model_operators
