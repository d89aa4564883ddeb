#pragma once

#include "runtime/device/rank_device.hpp"

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace smp {

/// Memory of a device that a copy reads or writes. It may be given up at any
/// time: the kernels then wait for the copy before it is used again.
class lent_storage {
public:
  lent_storage(c10::Storage memory, std::shared_ptr<device_point> done,
               c10::Stream compute);

  ~lent_storage();

  lent_storage(const lent_storage&) = delete;
  lent_storage& operator=(const lent_storage&) = delete;

  /// What is launched from now on finds the copy done. May be called once.
  c10::Storage take();

private:
  c10::Storage memory_;
  std::shared_ptr<device_point> done_;
  c10::Stream compute_;
};

/// Moves content between a device and host memory where it is not needed for a
/// while, beside the kernels. It has lanes of its own: messages must not wait
/// for what these copies wait for. Nothing here waits on the host but `await`.
/// Thread-safe.
///
/// Content comes back to memory that is allocated for the kernels, so that they
/// have left it when it is written: however far the host is ahead of the
/// device, not more memory is in use than at its point in the program.
class storage_copies {
public:
  storage_copies(std::shared_ptr<accelerator> kind, c10::Stream compute,
                 const device_lane& out, const device_lane& in);

  c10::Device device() const noexcept {
    return compute_.device();
  }

  /// @returns what a failed device says; nothing: it works
  std::optional<std::string> failed() const {
    return failure_of(out_.watch);
  }

  /// @returns uninitialized host memory that the device copies fast
  /// @throws c10::Error if there is none
  c10::Storage pinned(uint64_t bytes) const;

  /// A copy to the host that has begun.
  struct departure {
    c10::Storage copy; // pinned
    std::shared_ptr<device_point> done;
    std::unique_ptr<lent_storage> from;
  };

  /// Copies a range of bytes as all kernels leave them that were launched.
  departure to_host(c10::Storage from, uint64_t offset, uint64_t bytes) const;

  /// Copies the first `bytes` of pinned memory to the device.
  /// @param gap bytes without content before them
  /// @param ready when they are there; null: they are
  std::unique_ptr<lent_storage> to_device(const c10::Storage& from,
                                          uint64_t bytes, uint64_t gap,
                                          const device_point* ready) const;

  /// Copies the first `bytes` of pinned memory over a range of the device's:
  /// after the kernels that were launched, before those that will be.
  /// @returns when it is read
  std::shared_ptr<device_point> overwrite(const c10::Storage& from,
                                          const c10::Storage& to,
                                          uint64_t offset,
                                          uint64_t bytes) const;

  /// The host waits for a point of one of these lanes.
  /// @throws c10::AcceleratorError if the device has failed
  void await(device_point& x) const;

private:
  std::shared_ptr<accelerator> kind_;
  c10::Stream compute_;
  device_lane out_;
  device_lane in_;
};

} // namespace smp
