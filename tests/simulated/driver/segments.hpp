#pragma once

#include "tests/simulated/driver/options.hpp"

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

namespace smp::sim {

/// The least that a device gives.
constexpr size_t segment_size = size_t{2} << 20;

struct segment {
  int device;
  /// Into the reserved addresses, and into the views.
  size_t offset, size;
  int file;
  /// Of another process's device: takes no memory of this one's.
  bool imported;
};

/// The memory of all devices, in files that are mapped for kernels.
class segment_table {
public:
  segment_table();

  /// @returns nullptr if the device is full
  void* make(int device, size_t bytes);

  void* import(int device, size_t bytes, int file);

  /// @param begin what make() or import() gave
  void release(void* begin);

  std::optional<segment> find(const void*);

  void* begin_of(const segment& x) const {
    return reserved_ + x.offset;
  }

  /// -1 if it is none of ours.
  int device_of(const void*) const;

  void* view_of(const void*) const;

  size_t used(int device);

private:
  /// Addresses of one device.
  struct space {
    size_t next = 0, end = 0;
    std::deque<segment> retired;
    size_t used = 0;
  };

  space& of(int device) {
    return spaces_.at(static_cast<size_t>(device));
  }

  size_t place(space&, size_t bytes);

  void* map(const segment&);

  std::mutex mutex_;
  char* reserved_;                     // what device addresses point into
  char* views_;                        // where kernels look
  std::map<size_t, segment> segments_; // by offset
  std::array<space, max_devices> spaces_;
};

segment_table& segments();

} // namespace smp::sim
