#include "runtime/base/autocast.hpp"

#include "runtime/base/rank_context.hpp"

#include <ATen/autocast_mode.h>

namespace smp {

namespace {

std::vector<c10::DeviceType> devices_of_rank() {
  std::vector result{c10::kCPU};
  if (auto device = rank_context::current_device(); !device.is_cpu())
    result.push_back(device.type());
  return result;
}

} // namespace

autocast::autocast(c10::ScalarType dtype) : autocast(dtype, devices_of_rank()) {
  // nop
}

autocast::autocast(c10::ScalarType dtype, c10::DeviceType device)
  : autocast(dtype, std::vector{device}) {
  // nop
}

autocast::autocast(c10::ScalarType dtype,
                   const std::vector<c10::DeviceType>& devices)
  : cache_before_(at::autocast::is_autocast_cache_enabled()) {
  if (dtype == c10::ScalarType::Float)
    return;
  for (auto x : devices) {
    before_.push_back({x, at::autocast::is_autocast_enabled(x),
                       at::autocast::get_autocast_dtype(x)});
    at::autocast::set_autocast_enabled(x, true);
    at::autocast::set_autocast_dtype(x, dtype);
  }
  at::autocast::set_autocast_cache_enabled(false);
}

autocast::~autocast() {
  for (auto& x : before_) {
    at::autocast::set_autocast_enabled(x.device, x.enabled);
    at::autocast::set_autocast_dtype(x.device, x.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

} // namespace smp
