#include "runtime/models/mlp.hpp"

#include "runtime/models/sizes.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/types.h>

namespace nn = torch::nn;

namespace smp {

void validate(const mlp_config& x) {
  require_positive("model.inputs", x.inputs);
  require_positive("model.width", x.width);
  require_positive("model.layers", x.layers);
  require_positive("model.outputs", x.outputs);
}

mlp_impl::mlp_impl(const mlp_config& x) {
  validate(x);
  for (int64_t i = 0; i < x.layers; ++i) {
    body->push_back(nn::Linear(i == 0 ? x.inputs : x.width, x.width));
    body->push_back(nn::GELU());
  }
  head = submodule<nn::Linear>(x.width, x.outputs);
  register_module("body", body);
  register_module("head", head);
}

torch::Tensor mlp_impl::forward(torch::Tensor x) {
  return head(body->forward(x));
}

} // namespace smp
