// The model of docs/tutorial.md with its loss, for `smp-train verify`.

#include "smp/plugin.hpp"
#include "tutorial_model.hpp"

#include <torch/nn/functional/loss.h>

namespace tutorial {

struct net_with_loss_impl : torch::nn::Module {
  explicit net_with_loss_impl(const smp::model_options&) {
    register_module("model", model);
  }
  torch::Tensor forward(torch::Tensor x, torch::Tensor y) {
    return torch::nn::functional::cross_entropy(model(x), y);
  }

  smp::submodule<net> model;
};
TORCH_MODULE_IMPL(net_with_loss, net_with_loss_impl);

SMP_REGISTER_MODEL("tutorial", net_with_loss)

} // namespace tutorial
