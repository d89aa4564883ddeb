#pragma once

#include <cstdint>

namespace smp {

/// What a request asks of the rank that owns a module.
enum class request_kind : uint8_t {
  call,         // forward of one module
  range,        // forward of consecutive children of a Sequential (R8)
  backward,     // backward of a call or range
  read_tensor,  // the value of a parameter or buffer (R14)
  add_gradient, // a gradient of a parameter (R14)
  write_tensor, // a new value of a buffer
  // TorchScript modules (runtime/intercept/script/script_calls.hpp):
  method,        // one method
  method_range,  // consecutive children of a Sequential (R8)
  get_attribute, // the value of an attribute that may change
  set_attribute,
  add, // the sum of two tensors; has no module
};

constexpr request_kind last_of(request_kind) noexcept {
  return request_kind::add;
}

} // namespace smp
