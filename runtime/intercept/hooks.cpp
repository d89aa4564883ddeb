#include "runtime/intercept/hooks.hpp"

#include "runtime/intercept/sequential.hpp"
#include "runtime/model/hook.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

namespace smp {

void install_hooks(walked_model& model) {
  for (auto& m : model.modules)
    if (auto* hook = m.object ? dynamic_cast<hook_base*>(m.object) : nullptr)
      m.hooks.push_back(&hook->smp_hook);
  for (auto& m : model.modules) {
    auto* x = m.sequential ? dynamic_cast<torch::nn::SequentialImpl*>(m.object)
                           : nullptr;
    if (x == nullptr)
      continue;
    auto hooks = intercept_children(*x);
    for (size_t i = 0; i < hooks.size(); ++i)
      model.modules[m.children.at(i)].hooks.push_back(hooks[i]);
  }
}

} // namespace smp
