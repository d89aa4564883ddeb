#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace smp {

/// Enables autocast on one device type for the calling thread and everything it
/// calls, on other ranks too. The autocast cache is off, as in every step body
/// (see docs/execution.md). LibTorch has no C++ guard for autocast. Run forward
/// and the loss inside its scope, and `model.backward` after it.
class autocast {
public:
  /// @param dtype bfloat16 or float16; float32 leaves everything as it is
  explicit autocast(c10::ScalarType dtype,
                    c10::DeviceType device = c10::DeviceType::CPU);
  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_before_;
};

} // namespace smp
