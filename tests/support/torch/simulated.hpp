#pragma once

#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <future>
#include <string>

// For tests that link smp_simulated_device (tests/simulated).

namespace smp::test {

inline c10::Device sim_device(c10::DeviceIndex index = 0) {
  return {c10::kPrivateUse1, index};
}

inline c10::Stream new_sim_stream(c10::DeviceIndex index = 0) {
  return c10::impl::VirtualGuardImpl{c10::kPrivateUse1}.getNewStream(
    sim_device(index));
}

/// Delays, poison and the checker.
inline sim::options strict_devices(int delay_us = 50) {
  auto result = sim::config();
  result.delay_us = delay_us;
  result.poison = true;
  result.check = true;
  return result;
}

/// Strict devices of a scope, and what the checker found meanwhile.
class checked_devices {
public:
  explicit checked_devices(int delay_us = 50)
    : options_(strict_devices(delay_us)) {
    sim::forget_races();
  }

  /// @returns the last one; empty if there is none
  std::string race() const {
    return sim::races_found() > 0 ? sim::last_race() : "";
  }

private:
  sim::changed_options options_;
};

/// Keeps a stream from going on: what is given to it has not happened.
class held_stream {
public:
  explicit held_stream(c10::Stream x) {
    sim::notify(x.device_index(), x.id(),
                [go_on = go_on_.get_future().share()] { go_on.wait(); });
  }

  ~held_stream() {
    release();
  }

  held_stream(const held_stream&) = delete;

  held_stream& operator=(const held_stream&) = delete;

  void release() {
    if (!released_)
      go_on_.set_value();
    released_ = true;
  }

private:
  std::promise<void> go_on_;
  bool released_ = false;
};

} // namespace smp::test
