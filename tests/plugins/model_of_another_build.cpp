// What a library looks like that was built for an older interface.

#define SMP_PLUGIN_INTERFACE 0

#include "smp/plugin.hpp"

#include <torch/nn/modules/linear.h>

namespace model_of_another_build {

struct net_impl : torch::nn::Module {
  explicit net_impl(const smp::model_options&) {
    throw std::logic_error{"code of another build was called"};
  }

  torch::Tensor forward(torch::Tensor x) {
    return x;
  }
};
TORCH_MODULE_IMPL(net, net_impl);

SMP_REGISTER_MODEL("net", net)

} // namespace model_of_another_build
