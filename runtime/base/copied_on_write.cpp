#include "runtime/base/copied_on_write.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_lazy_clone.h>
#include <c10/core/InferenceMode.h>

namespace smp {

at::Tensor copied_on_write(const at::Tensor& x) {
  // On a device the copy would be made on another stream than kernels use, and
  // a lack of memory for it would free the tensor's memory twice.
  if (!x.device().is_cpu() || !x.has_storage()
      || x.storage().allocator() == nullptr)
    return {};
  try {
    return at::_lazy_clone(x.detach());
  } catch (const c10::Error&) {
    return {};
  }
}

void put_content(const at::Tensor& to, const at::Tensor& from) {
  if (to.sizes() != from.sizes() || to.dtype() != from.dtype())
    return;
  at::NoGradGuard no_grad;
  if (to.is_inference()) {
    c10::InferenceMode mode;
    to.copy_(from);
  } else {
    to.variable_data().copy_(from);
  }
}

} // namespace smp
