#include "runtime/base/autocast.hpp"

#include <ATen/autocast_mode.h>

namespace smp {

autocast::autocast(c10::ScalarType dtype, c10::DeviceType device)
  : device_(device),
    enabled_before_(at::autocast::is_autocast_enabled(device)),
    dtype_before_(at::autocast::get_autocast_dtype(device)),
    cache_before_(at::autocast::is_autocast_cache_enabled()) {
  if (dtype == c10::ScalarType::Float)
    return;
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(false);
}

autocast::~autocast() {
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

} // namespace smp
