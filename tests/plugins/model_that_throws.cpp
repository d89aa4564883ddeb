// Models that fail by an option, for tests: when they are made, or called.

#include "smp/plugin.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <stdexcept>
#include <string>

namespace model_that_throws {

struct net_impl : torch::nn::Module {
  explicit net_impl(const smp::model_options& x)
    : fault(x.text("fault", "none")) {
    if (fault == "made")
      throw std::invalid_argument("seven is not a width\nsaid the model");
    if (fault == "odd")
      throw 7;
    register_module("fc", fc);
    register_module("out", out);
  }

  /// x: [B, 8], y: [B] @returns the mean squared error
  torch::Tensor forward(torch::Tensor x, torch::Tensor y) {
    if (fault == "traced" && !torch::GradMode::is_enabled())
      throw std::runtime_error("wants gradients");
    if (fault == "called" || (fault == "evaluated" && !is_training()))
      throw std::runtime_error("no such luck");
    return torch::mse_loss(out(torch::tanh(fc(x))).squeeze(1), y);
  }

  std::string fault;
  smp::submodule<torch::nn::Linear> fc{8, 8}, out{8, 1};
};
TORCH_MODULE_IMPL(net, net_impl);

SMP_REGISTER_MODEL("net", net)

} // namespace model_that_throws
