#include "runtime/train/models/mlp.hpp"

#include "runtime/nn/sizes.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

namespace smp {

mlp_impl::mlp_impl(const model_sizes& x) {
  require_positive("model.inputs", x.inputs);
  require_positive("model.outputs", x.outputs);
  require_positive("model.layers", x.layers);
  require_positive("model.width", x.width);
  for (int64_t i = 0; i < x.layers; ++i) {
    if (i > 0)
      layers->push_back(torch::nn::ReLU());
    layers->push_back(torch::nn::Linear(
      i > 0 ? x.width : x.inputs, i + 1 < x.layers ? x.width : x.outputs));
  }
  register_module("layers", layers);
}

torch::Tensor mlp_impl::forward(torch::Tensor x) {
  return layers->forward(x);
}

} // namespace smp
