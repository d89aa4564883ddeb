#pragma once

#include "runtime/intercept/call_scope.hpp"

namespace smp {

/// Waits for the device after each module, forward and backward, so that an
/// error of the device is the error of the module that made it
/// (`smp.wait_for_device`).
class device_interceptor final : public call_interceptor {
public:
  bool looks() const noexcept override {
    return true;
  }

  void results(const intercepted_call& x,
               std::span<const at::Tensor> xs) override;

  void leave(const intercepted_call& x, bool failed) override;
};

} // namespace smp
