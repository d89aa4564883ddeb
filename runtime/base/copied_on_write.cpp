#include "runtime/base/copied_on_write.hpp"

#include <ATen/ops/_lazy_clone.h>

namespace smp {

at::Tensor copied_on_write(const at::Tensor& x) {
  if (!x.has_storage() || x.storage().allocator() == nullptr)
    return {};
  try {
    return at::_lazy_clone(x.detach());
  } catch (const c10::Error&) {
    return {};
  }
}

} // namespace smp
