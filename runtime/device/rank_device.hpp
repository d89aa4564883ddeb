#pragma once

#include "runtime/device/accelerator.hpp"
#include "runtime/device/device_watch.hpp"
#include "transport/device_ops.hpp"

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class device_copies;
class storage_copies;

/// A stream of a device, and another one that waits for points in its work to
/// tell that they are reached: the stream itself must not be held up by that.
struct device_lane {
  c10::Stream work;
  c10::Stream watch;
};

/// The device on which a rank computes; one on the host has none. All its
/// kernels run on one stream, in the order of their launches, whichever thread
/// launches them: what an execution wrote needs no event to be read by the next
/// one. Copies from and to the host have streams of their own. Thread-safe.
class rank_device {
public:
  /// A device that others of this process may use as well.
  rank_device(std::shared_ptr<accelerator> kind, c10::DeviceIndex index);

  ~rank_device();

  rank_device(const rank_device&) = delete;
  rank_device& operator=(const rank_device&) = delete;

  c10::Device get() const noexcept {
    return device_;
  }

  /// From now on the calling thread launches on the stream of this rank, as
  /// its own device.
  void enter_thread() const;

  /// The calling thread launches on the default stream again, where all that
  /// the rank wrote is there. Waits for the device, unless it has failed, for
  /// five minutes.
  void leave_thread() const;

  /// @returns the point in the work of the rank after all that the calling
  /// thread launched
  std::shared_ptr<device_event> point() const;

  /// Calls `f` when that point is reached, or when the device has failed.
  void when_reached(std::function<void()> f) const;

  /// The host waits for all that the rank launched.
  /// @throws c10::AcceleratorError if the device has failed
  void settle() const;

  /// @returns what a failed device says; nothing: it works
  std::optional<std::string> failed() const {
    return failure_of(compute_.watch);
  }

  // -- time -------------------------------------------------------------------

  /// An execution begins, or goes on: what it launches from now on counts.
  void begin_span() const;

  /// It ends or pauses. Looks at the memory, too.
  void end_span() const;

  /// @returns how long the device worked in all spans since the last call.
  /// @pre their ends are reached
  std::chrono::nanoseconds take_busy() const;

  // -- memory -----------------------------------------------------------------

  /// In bytes; of all ranks of this process that compute there.
  struct memory {
    uint64_t now = 0;
    uint64_t peak = 0;
    uint64_t total = 0; // that the device has
  };

  /// Asks the allocator, which does not wait for the device. But whoever waits
  /// for the device to give memory back holds its lock.
  memory look_at_memory() const;

  /// @returns what was seen last, nothing used before that. Never waits: for
  /// those who watch a rank that may be stuck.
  memory last_memory() const noexcept;

  /// How tensors get from and to this device.
  std::shared_ptr<device_ops> copies() const;

  /// @returns new lanes for content that leaves the device for a while
  std::shared_ptr<storage_copies> make_storage_copies() const;

private:
  std::shared_ptr<accelerator> kind_;
  c10::Device device_;
  device_lane compute_;
  uint64_t memory_total_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<c10::Event, c10::Event>> spans_;
  mutable std::atomic<uint64_t> memory_now_ = 0;
  mutable std::atomic<uint64_t> memory_peak_ = 0;
  std::shared_ptr<device_copies> copies_;
  mutable device_watch watch_;
};

/// A point in the work of a lane.
class device_point final : public device_event {
public:
  /// After all that was launched on `lane` by now.
  /// @param watch then `then` calls back even if the device fails; null: never
  device_point(std::shared_ptr<accelerator> kind, const device_lane& lane,
               std::shared_ptr<device_watch> watch = {});

  void then(std::function<void()> f) override;

  bool failed() const override {
    return failure_of(watch_).has_value();
  }

  /// From here on `x` waits for this point.
  void block(c10::Stream x) const {
    event_.block(x);
  }

private:
  void notify(std::function<void()> f);

  std::shared_ptr<accelerator> kind_;
  c10::Stream watch_;
  c10::Event event_;
  std::shared_ptr<device_watch> failures_;
};

/// Finds the device of a rank: its machine's device local rank modulo count,
/// so several ranks may share one.
/// @param wanted `smp.device`; "auto": cuda, if this process can use it. If
/// that is not so though there is a driver, local rank 0 says why.
/// @param local_rank number of the rank among those of its machine
/// @returns null: the host
/// @throws error (config) naming what there is, or why there is none
std::shared_ptr<rank_device> choose_device(const std::string& wanted,
                                           uint64_t local_rank);

} // namespace smp
