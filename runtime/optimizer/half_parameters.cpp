#include "runtime/optimizer/half_parameters.hpp"

#include "runtime/config/session_config.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"

#include <ATen/core/grad_mode.h>

namespace smp {

std::optional<c10::ScalarType> parameter_type(const session_config& x) {
  if (x.bf16_params)
    return c10::ScalarType::BFloat16;
  if (x.fp16_params)
    return c10::ScalarType::Half;
  return std::nullopt;
}

void cast_parameters(const walked_model& model, c10::ScalarType type) {
  at::NoGradGuard no_grad;
  for (auto& t : model.tensors) {
    auto x = t.tensor; // a handle to the same tensor
    if (t.is_attribute || !x.defined() || !x.is_floating_point()
        || x.scalar_type() == type)
      continue;
    delay_param_initialization later{is_deferred(x)};
    x.set_data(x.to(type));
  }
}

} // namespace smp
