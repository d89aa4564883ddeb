#include "runtime/base/call_context.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace smp {

namespace {

namespace ac = at::autocast;

std::vector<call_context::autocast_entry> enabled_autocast() {
  std::vector<call_context::autocast_entry> result;
  for (auto device : ac::_AUTOCAST_SUPPORTED_DEVICES)
    if (ac::is_autocast_enabled(device))
      result.push_back({device, ac::get_autocast_dtype(device)});
  return result;
}

} // namespace

bool has_autocast(c10::DeviceType x) {
  auto& all = ac::_AUTOCAST_SUPPORTED_DEVICES;
  return std::find(all.begin(), all.end(), x) != all.end();
}

call_context call_context::current() {
  return {c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(),
          enabled_autocast()};
}

scoped_context::scoped_context(const call_context& x)
  : before_(enabled_autocast()),
    cache_before_(ac::is_autocast_cache_enabled()),
    grad_before_(c10::GradMode::is_enabled()) {
  // Only if it is on: InferenceMode(false) would make backward leave the
  // thread that may park.
  if (x.inference)
    inference_ = std::make_unique<c10::InferenceMode>();
  c10::GradMode::set_enabled(x.grad);
  for (auto& y : x.autocast)
    dtypes_.push_back({y.device, ac::get_autocast_dtype(y.device)});
  set_autocast(x.autocast);
  ac::set_autocast_cache_enabled(false);
}

scoped_context::~scoped_context() {
  set_autocast(before_);
  for (auto& x : dtypes_)
    ac::set_autocast_dtype(x.device, x.dtype);
  ac::set_autocast_cache_enabled(cache_before_);
  inference_.reset();
  c10::GradMode::set_enabled(grad_before_);
}

void scoped_context::set_autocast(
  const std::vector<call_context::autocast_entry>& xs) {
  for (auto device : ac::_AUTOCAST_SUPPORTED_DEVICES)
    if (ac::is_autocast_enabled(device))
      ac::set_autocast_enabled(device, false);
  for (auto& x : xs) {
    ac::set_autocast_enabled(x.device, true);
    ac::set_autocast_dtype(x.device, x.dtype);
  }
}

} // namespace smp
