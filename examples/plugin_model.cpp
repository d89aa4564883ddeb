// A model of your own for smp-train, as a shared library:
//   [model]
//   type = "plugin"
//   library = "libplugin_model.so"
//   name = "two_towers"
//   [model.options]
//   width = 64

#include "smp/plugin.hpp"

#include <torch/torch.h>

namespace plugin_model {

/// Two networks that are independent of each other until the end.
struct two_towers_impl : torch::nn::Module {
  explicit two_towers_impl(const smp::model_options& x) {
    const auto width = x.integer("width", 32);
    for (auto* tower : {&left, &right})
      for (int i = 0; i < 2; ++i) {
        (*tower)->push_back(torch::nn::Linear(i == 0 ? 8 : width, width));
        (*tower)->push_back(torch::nn::Tanh());
      }
    register_module("left", left);
    register_module("right", right);
    head = smp::submodule<torch::nn::Linear>(2 * width, 1);
    register_module("head", head);
  }

  /// x, y: [B, 8], target: [B] @returns the mean squared error
  torch::Tensor forward(torch::Tensor x, torch::Tensor y,
                        torch::Tensor target) {
    auto both = torch::cat({left->forward(x), right->forward(y)}, 1);
    return torch::mse_loss(head(both).squeeze(1), target);
  }

  torch::nn::Sequential left, right;
  smp::submodule<torch::nn::Linear> head = nullptr;
};
TORCH_MODULE_IMPL(two_towers, two_towers_impl);

SMP_REGISTER_MODEL("two_towers", two_towers)

} // namespace plugin_model
