#pragma once

// A model of two layers, and the same in plain LibTorch.

#include "runtime/intercept/submodule.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace smp::test {

template <template <class> class Part>
struct two_layers_of : torch::nn::Module {
  explicit two_layers_of(int64_t width = 4, int64_t between = 7)
    : first(width, between), second(between, 1) {
    register_module("first", first);
    register_module("second", second);
  }

  /// x: [N, width] @returns [N, 1]
  Tensor forward(Tensor x) {
    return second(torch::tanh(first(x)));
  }

  Part<torch::nn::Linear> first, second;
};

struct two_layers_impl : two_layers_of<submodule> {
  using two_layers_of::two_layers_of;
};
TORCH_MODULE_IMPL(two_layers, two_layers_impl);

} // namespace smp::test
