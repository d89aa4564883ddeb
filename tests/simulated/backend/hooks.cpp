#include "tests/simulated/backend/allocators.hpp"
#include "tests/simulated/backend/creation.hpp"
#include "tests/simulated/backend/generator.hpp"
#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

namespace smp::sim {

namespace {

/// What Torch's code for any accelerator asks of it.
class sim_hooks final : public at::PrivateUse1HooksInterface {
public:
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return config().devices > 0;
  }

  /// As with CUDA: whether this process has done anything on the device.
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device_used(device);
  }

  c10::DeviceIndex deviceCount() const override {
    return to_index(config().devices);
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return to_index(current_device());
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return to_index(exchange_device(device));
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator&
  getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }

  at::Device getDeviceFromPtr(void* address) const override {
    auto device = device_of(address);
    TORCH_CHECK(device >= 0, "not device memory");
    return {sim_type, to_index(device)};
  }

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

/// When the library is loaded.
[[maybe_unused]] const auto registered = [] {
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(sim_type, &device_allocator());
  at::setHostAllocator(sim_type, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new sim_hooks);
  return true;
}();

} // namespace

} // namespace smp::sim
