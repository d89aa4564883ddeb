#include "runtime/base/call_context.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace smp {

namespace {

namespace ac = at::autocast;

bool is_supported(c10::DeviceType x) {
  auto& all = ac::_AUTOCAST_SUPPORTED_DEVICES;
  return std::find(all.begin(), all.end(), x) != all.end();
}

std::vector<call_context::autocast_entry> enabled_autocast() {
  std::vector<call_context::autocast_entry> result;
  for (auto device : ac::_AUTOCAST_SUPPORTED_DEVICES)
    if (ac::is_autocast_enabled(device))
      result.push_back({device, ac::get_autocast_dtype(device)});
  return result;
}

} // namespace

call_context call_context::current() {
  return {c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(),
          enabled_autocast()};
}

void call_context::write(byte_writer& out) const {
  out.boolean(grad);
  out.boolean(inference);
  out.u8(static_cast<uint8_t>(autocast.size()));
  for (auto& x : autocast) {
    out.u8(static_cast<uint8_t>(x.device));
    out.u8(static_cast<uint8_t>(x.dtype));
  }
}

call_context call_context::read(byte_reader& in) {
  call_context result;
  result.grad = in.boolean("grad mode");
  result.inference = in.boolean("inference mode");
  for (auto n = in.u8("autocast device types"); n > 0; --n) {
    auto device = static_cast<c10::DeviceType>(in.u8("autocast device type"));
    auto dtype = in.u8("autocast dtype");
    if (!is_supported(device))
      in.fail("autocast device type", "has no autocast");
    if (dtype >= c10::NumScalarTypes
        || !c10::isFloatingType(static_cast<c10::ScalarType>(dtype)))
      in.fail("autocast dtype", "is no floating-point type");
    result.autocast.push_back({device, static_cast<c10::ScalarType>(dtype)});
  }
  return result;
}

scoped_context::scoped_context(const call_context& x)
  : before_(enabled_autocast()),
    cache_before_(ac::is_autocast_cache_enabled()),
    grad_before_(c10::GradMode::is_enabled()) {
  // Only if it is on: InferenceMode(false) would let backward leave the
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
