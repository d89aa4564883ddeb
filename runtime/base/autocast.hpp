#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace smp {

/// Enables autocast for the calling thread and everything it calls, on other
/// ranks too. The autocast cache is off, as in every step body (see
/// docs/execution.md). LibTorch has no C++ guard for autocast. Run forward and
/// the loss inside its scope, and `model.backward` after it.
class autocast {
public:
  /// On the host, where the partition may measure, and on the rank's device.
  /// @param dtype bfloat16 or float16; float32 leaves everything as it is
  explicit autocast(c10::ScalarType dtype);

  /// On one type of device.
  autocast(c10::ScalarType dtype, c10::DeviceType device);

  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

private:
  struct setting {
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };

  autocast(c10::ScalarType dtype, const std::vector<c10::DeviceType>& devices);

  std::vector<setting> before_;
  bool cache_before_;
};

} // namespace smp
