// Makes the simulated device known to smp: smp.device = "sim".

#include "runtime/device/accelerator.hpp"
#include "tests/simulated/backend/failures.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace smp::sim {

namespace {

class simulated_accelerator final : public accelerator {
public:
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }

  void notify(c10::Stream x, std::function<void()> f) override {
    check_device(x.device_index());
    sim::notify(x.device_index(), x.id(), std::move(f));
  }

  void* allocate_shared(c10::DeviceIndex device, size_t bytes) override {
    return raw_allocate(device, bytes);
  }

  std::string export_shared(void* x) override {
    if (config().no_peers)
      return {};
    auto handle = export_memory(x);
    return {reinterpret_cast<const char*>(&handle), sizeof handle};
  }

  void* open_shared(c10::DeviceIndex device,
                    const std::string& exported) override {
    memory_handle handle{};
    if (config().no_peers || exported.size() != sizeof handle)
      return nullptr;
    std::memcpy(&handle, exported.data(), sizeof handle);
    return import_memory(device, handle);
  }

  void close_shared(void* opened) override {
    close_memory(opened);
  }
};

const bool added = [] {
  add_accelerator("sim", std::make_shared<simulated_accelerator>());
  return true;
}();

} // namespace

} // namespace smp::sim
