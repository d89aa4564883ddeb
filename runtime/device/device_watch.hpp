#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace smp {

/// @returns the error of a device that does nothing any more; nothing: it works
std::optional<std::string> failure_of(c10::Stream x);

/// Tells that a device has come to a point, or that it has failed and never
/// will: then nobody else tells (`device_event`). Thread-safe.
class device_watch {
public:
  /// @param x waits for nothing but points of the device
  explicit device_watch(c10::Stream x) : looked_at_(x) {
    // nop
  }

  ~device_watch();

  device_watch(const device_watch&) = delete;
  device_watch& operator=(const device_watch&) = delete;

  /// Calls `f` once: when what `ask` gets is called, as `device_event::then`
  /// does, or within some seconds of the failure of the device.
  void when_reached(const std::function<void(std::function<void()>)>& ask,
                    std::function<void()> f);

private:
  struct waiting {
    std::mutex mutex;
    std::map<uint64_t, std::function<void()>> calls;
    uint64_t next = 0;

    void tell(uint64_t number);
    void tell_all();
  };

  void run(const std::stop_token& stop);

  c10::Stream looked_at_;
  std::shared_ptr<waiting> waiting_ = std::make_shared<waiting>();
  std::jthread thread_; // from the first call on
};

} // namespace smp
