#include "tests/simulated/backend/allocators.hpp"
#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <cstring>

namespace smp::sim {

namespace {

class sim_allocator final : public c10::DeviceAllocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    auto* made = sim::allocate(device, current_stream(device), bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, made != nullptr || bytes == 0,
                     "sim: out of memory. Tried to allocate ", bytes,
                     " bytes on sim:", device, ", of which ",
                     memory(device).free, " are free");
    return {made, made, &sim::free, {sim_type, to_index(device)}};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &sim::free;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes == 0)
      return;
    auto device = device_of(to);
    launch(device, current_stream(device), "copy of a storage",
           [into = kernel_view(to), out_of = kernel_view_of(from), bytes] {
             std::memcpy(into, out_of, bytes);
           },
           {{to, bytes, true}, {from, bytes, false}});
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (auto device = 0; device < config().devices; ++device)
      empty_cache(device);
  }

  void recordStream(const c10::DataPtr& x, c10::Stream user) override {
    use_on(x.get_context(), user.device_index(), user.id());
  }

  /// Of the bytes that are allocated, and those taken from the device.
  c10::CachingDeviceAllocator::DeviceStats
  getDeviceStats(c10::DeviceIndex device) override {
    auto amounts = memory(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    auto& allocated = result.allocated_bytes[0];
    allocated.current = static_cast<int64_t>(amounts.allocated);
    allocated.peak = static_cast<int64_t>(amounts.peak);
    result.reserved_bytes[0].current = static_cast<int64_t>(amounts.total
                                                            - amounts.free);
    return result;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    // nop
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto amounts = memory(device);
    return {amounts.free, amounts.total};
  }
};

} // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* const only = new sim_allocator;
  return *only;
}

} // namespace smp::sim
