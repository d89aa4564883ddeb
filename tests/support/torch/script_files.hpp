#pragma once

// TorchScript files that are written when a test runs.

#include <torch/csrc/jit/api/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>

namespace smp::test {

/// An empty module; modules of one file share `unit`.
inline torch::jit::Module
empty_script(const std::string& name,
             const std::shared_ptr<torch::jit::CompilationUnit>& unit) {
  return torch::jit::Module{c10::QualifiedName{"__torch__." + name}, unit,
                            true};
}

/// A chain of square linear layers "layer0", ...; forward takes [batch, width]
/// and returns the mean square of what comes out.
/// @param trained layers at the end whose weights are trained, not only biases
inline torch::jit::Module script_chain(int64_t layers, int64_t width,
                                       int64_t trained) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto root = empty_script("chain", unit);
  std::string forward = "def forward(self, x):\n";
  torch::manual_seed(1);
  for (int64_t i = 0; i < layers; ++i) {
    auto layer = empty_script("layer", unit);
    layer.register_parameter("weight",
                             torch::randn({width, width})
                               .div_(std::sqrt(static_cast<double>(width)))
                               .set_requires_grad(i + trained >= layers),
                             false);
    layer.register_parameter(
      "bias", torch::randn({width}).set_requires_grad(true), false);
    layer.define(
      "def forward(self, x):\n"
      "  return torch.matmul(x, self.weight.t()) + self.bias\n");
    auto name = "layer" + std::to_string(i);
    root.register_module(name, layer);
    forward += "  x = self." + name + ".forward(x)\n";
  }
  root.define(forward + "  return (x * x).mean()\n");
  return root;
}

} // namespace smp::test
