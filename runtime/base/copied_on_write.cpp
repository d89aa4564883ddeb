#include "runtime/base/copied_on_write.hpp"

#include <ATen/ops/_lazy_clone.h>

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

} // namespace smp
