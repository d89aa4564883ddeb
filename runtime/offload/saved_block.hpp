#pragma once

#include "runtime/device/storage_copies.hpp"
#include "runtime/offload/file_slots.hpp"
#include "transport/error.hpp"

#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace smp {

/// What a device rings, also after the end of an `offload_store`. It must not
/// wait for who uses the device, so the mutex is never held meanwhile.
struct doorbell {
  std::mutex mutex;
  std::condition_variable work;
};

/// Bytes that an `offload_store` writes and reads together. Several sets may
/// share them.
struct saved_block {
  c10::Storage memory = {}; // of the host; empty: only the file has the bytes
  uint64_t offset = 0;      // in `memory`
  uint64_t bytes = 0;
  uint64_t misalignment = 0; // where they come from
  std::optional<file_slots::slot> slot = {};
  uint32_t holders = 0; // sets that share it
  uint32_t wanted = 0;  // of these, the ones that need it in memory
  bool stays = false;   // in memory, as the file has no space
  bool moving = false;
  failure why = {}; // set if it could not be written or read
  bool on_device = false;
  /// The first copy to `memory`, where a device makes it.
  std::shared_ptr<bool> copied = {};
  std::shared_ptr<device_point> ready = {};
  std::unique_ptr<lent_storage> from = {};
  /// On the device again, as it is needed next.
  std::unique_ptr<lent_storage> back = {};

  /// Of these bytes, which begin to leave their device if they are on one.
  /// @param bell rings when `copied` becomes true
  static std::shared_ptr<saved_block> make(const c10::Storage& from,
                                           uint64_t offset, uint64_t bytes,
                                           const storage_copies* device,
                                           std::shared_ptr<doorbell> bell);

  bool is_there() const {
    return !copied || *copied;
  }

  /// Bytes without content before those that are read.
  uint64_t gap() const {
    return on_device ? 0 : misalignment;
  }

  /// @returns uninitialized memory of the host for the gap and the bytes
  /// @throws c10::Error if there is none
  c10::Storage room(const storage_copies* device) const;
};

} // namespace smp
