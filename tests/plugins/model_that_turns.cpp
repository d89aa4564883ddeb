// A model of which one part returns another type after some calls, for tests.

#include "smp/plugin.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

namespace model_that_turns {

struct turning_impl : torch::nn::Module {
  explicit turning_impl(uint64_t calls) : left(calls) {
    register_module("fc", fc);
  }

  /// @returns float32, and float64 with the same numbers once it turned
  torch::Tensor forward(torch::Tensor x) {
    auto y = fc(x);
    return left == 0 ? y.to(torch::kDouble) : (--left, y);
  }

  uint64_t left;
  torch::nn::Linear fc{8, 8};
};
TORCH_MODULE_IMPL(turning, turning_impl);

struct net_impl : torch::nn::Module {
  explicit net_impl(const smp::model_options& x)
    : part(std::stoull(x.text("calls", "1"))) {
    register_module("part", part);
    register_module("out", out);
  }

  /// x: [B, 8], y: [B] @returns the mean squared error
  torch::Tensor forward(torch::Tensor x, torch::Tensor y) {
    auto z = torch::tanh(part(x)).to(torch::kFloat);
    return torch::mse_loss(out(z).squeeze(1), y);
  }

  smp::submodule<turning> part;
  smp::submodule<torch::nn::Linear> out{8, 1};
};
TORCH_MODULE_IMPL(net, net_impl);

SMP_REGISTER_MODEL("net", net)

} // namespace model_that_turns
