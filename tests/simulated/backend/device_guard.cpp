#include "tests/simulated/backend/failures.hpp"
#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/stream.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace smp::sim {

namespace {

/// Devices, streams and events, as Torch's generic classes ask for them.
class sim_guard final : public c10::impl::DeviceGuardImplInterface {
public:
  static constexpr c10::DeviceType static_type = sim_type;

  // -- devices ----------------------------------------------------------------

  c10::DeviceType type() const override {
    return sim_type;
  }

  c10::Device getDevice() const override {
    return {sim_type, to_index(current_device())};
  }

  c10::Device exchangeDevice(c10::Device x) const override {
    return {sim_type, to_index(exchange_device(x.index()))};
  }

  void setDevice(c10::Device x) const override {
    exchange_device(x.index());
  }

  void uncheckedSetDevice(c10::Device x) const noexcept override {
    exchange_device(x.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return to_index(config().devices);
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  void synchronizeDevice(c10::DeviceIndex x) const override {
    auto device = x < 0 ? to_index(current_device()) : x;
    wait_device(device);
    check_device(device);
  }

  // -- streams ----------------------------------------------------------------

  c10::Stream getStream(c10::Device x) const override {
    auto on = with_index(x);
    return stream_of(on, current_stream(on.index()));
  }

  c10::Stream getDefaultStream(c10::Device x) const override {
    return stream_of(with_index(x), 0);
  }

  c10::Stream getNewStream(c10::Device x, int) const override {
    auto on = with_index(x);
    return stream_of(on, new_stream(on.index()));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device x, bool) const override {
    auto on = with_index(x);
    return stream_of(on, pooled_stream(on.index()));
  }

  c10::Stream exchangeStream(c10::Stream x) const override {
    return stream_of(x.device(), exchange_stream(x.device_index(), x.id()));
  }

  bool queryStream(const c10::Stream& x) const override {
    auto idle = stream_idle(x.device_index(), x.id());
    check_device(x.device_index());
    return idle;
  }

  void synchronizeStream(const c10::Stream& x) const override {
    wait_stream(x.device_index(), x.id());
    check_device(x.device_index());
  }

  // -- events -----------------------------------------------------------------

  void record(void** x, const c10::Stream& on, c10::DeviceIndex device,
              c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == on.device_index(),
                "an event of another device");
    check_device(on.device_index());
    if (*x == nullptr)
      *x = new event{make_event()};
    sim::record(event_of(*x), on.device_index(), on.id());
  }

  void block(void* x, const c10::Stream& waiting) const override {
    check_device(waiting.device_index());
    if (x != nullptr)
      wait(event_of(x), waiting.device_index(), waiting.id());
  }

  bool queryEvent(void* x) const override {
    return x == nullptr || done(event_of(x));
  }

  void synchronizeEvent(void* x) const override {
    if (x != nullptr)
      synchronize(event_of(x));
  }

  void destroyEvent(void* x, c10::DeviceIndex) const noexcept override {
    if (x != nullptr)
      no_host_function("freeing an event");
    delete static_cast<event*>(x);
  }

  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr && done(event_of(from))
                  && done(event_of(to)),
                "events that have not been reached");
    return elapsed_ms(event_of(from), event_of(to));
  }

  void recordDataPtrOnStream(const c10::DataPtr& x,
                             const c10::Stream& user) const override {
    use_on(x.get_context(), user.device_index(), user.id());
  }

private:
  c10::Device with_index(c10::Device x) const {
    return x.has_index() ? x : getDevice();
  }

  static c10::Stream stream_of(c10::Device on, int64_t id) {
    return c10::Stream{c10::Stream::UNSAFE, on, id};
  }

  static event& event_of(void* x) {
    return *static_cast<event*>(x);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, sim_guard)

} // namespace

} // namespace smp::sim
