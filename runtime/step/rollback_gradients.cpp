#include "runtime/step/rollback_gradients.hpp"

#include "runtime/model/model_map.hpp"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace smp {

void rollback_gradients::keep(const model_map& map) {
  at::NoGradGuard no_grad;
  kept_.clear();
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& x = tensors[i].tensor;
    if (tensors[i].is_buffer || !map.owned(i) || !x.defined()
        || !x.requires_grad())
      continue;
    auto& gradient = x.grad();
    kept_.push_back(
      {x, gradient,
       gradient.defined() ? gradient.detach().clone() : at::Tensor{}});
  }
}

void rollback_gradients::put_back() {
  at::NoGradGuard no_grad;
  for (auto& x : std::exchange(kept_, {})) {
    // Other holders of the gradient, such as a flat view of all gradients, must
    // keep seeing it.
    if (x.gradient.defined() && x.gradient.layout() == at::kStrided)
      x.gradient.detach().copy_(x.content);
    else if (x.gradient.defined())
      x.gradient = x.content;
    x.parameter.mutable_grad() = x.gradient;
  }
}

} // namespace smp
