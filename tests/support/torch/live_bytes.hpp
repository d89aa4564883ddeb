#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>

namespace smp::test {

/// Counts bytes of tensors that the calling thread makes and lets go, under a
/// `c10::DebugInfoGuard`.
struct live_bytes : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, size_t, size_t,
                         c10::Device) override {
    now += size;
    peak = std::max(peak, now);
  }

  bool memoryProfilingEnabled() const override {
    return true;
  }

  int64_t now = 0, peak = 0;
};

} // namespace smp::test
