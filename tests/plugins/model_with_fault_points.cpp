// A model that is where tests let a rank fail (tests/faults).

#include "tests/faults/fault_point.hpp"

#include "smp/plugin.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

namespace model_with_fault_points {

void at(const char* phase) {
  if (smp_fault_point != nullptr)
    smp_fault_point(phase);
}

struct failing_impl : torch::nn::Module {
  failing_impl() {
    register_module("fc", fc);
  }

  torch::Tensor forward(torch::Tensor x) {
    at(is_training() ? "forward" : "evaluation");
    auto y = torch::tanh(fc(x));
    if (y.requires_grad())
      y.register_hook([](const torch::Tensor&) { at("backward"); });
    return y;
  }

  torch::nn::Linear fc{8, 8};
};
TORCH_MODULE_IMPL(failing, failing_impl);

struct net_impl : torch::nn::Module {
  explicit net_impl(const smp::model_options&) {
    at("start-up");
    register_module("part", part);
    register_module("out", out);
  }

  /// x: [B, 8], y: [B] @returns the mean squared error
  torch::Tensor forward(torch::Tensor x, torch::Tensor y) {
    return torch::mse_loss(out(part(x)).squeeze(1), y);
  }

  smp::submodule<failing> part;
  smp::submodule<torch::nn::Linear> out{8, 1};
};
TORCH_MODULE_IMPL(net, net_impl);

SMP_REGISTER_MODEL("net", net)

} // namespace model_with_fault_points
