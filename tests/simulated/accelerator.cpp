// Makes the simulated device known to smp: smp.device = "sim".

#include "runtime/device/accelerator.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <memory>
#include <utility>

namespace smp::sim {

namespace {

class simulated_accelerator final : public accelerator {
public:
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }

  void notify(c10::Stream x, std::function<void()> f) override {
    sim::notify(x.device_index(), x.id(), std::move(f));
  }
};

const bool added = [] {
  add_accelerator("sim", std::make_shared<simulated_accelerator>());
  return true;
}();

} // namespace

} // namespace smp::sim
