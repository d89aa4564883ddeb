#pragma once

#include "transport/error.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace smp {

class device_event;

/// Where the bytes of a tensor lie. Values are those of the tensor library;
/// transport/ only compares and copies them.
struct device_ref {
  uint8_t type = 0; // 0 = host memory
  int16_t index = -1;
  bool operator==(const device_ref&) const = default;
};

/// Tensor libraries count devices in 8 bits, -1 is the current one.
inline constexpr int16_t max_device_index = 127;

/// What is known of a tensor without its bytes: one that another rank keeps,
/// one that a call will return, or one that a message carried in another step.
struct tensor_meta {
  /// Element type, a code of the tensor library; opaque here.
  uint8_t dtype = 0;
  /// Where the bytes are.
  device_ref device;
  /// -1: the size of that axis is not known yet.
  std::vector<int64_t> shape;
  /// From one element of an axis to the next, in elements (`are_strides`);
  /// empty: row-major, or unknown as sizes are.
  std::vector<int64_t> strides;
};

/// A tensor below the tensor library: bytes without gaps, their meaning, and
/// the owner that keeps them alive. All sizes are known.
struct tensor_ref : tensor_meta {
  const void* data = nullptr;
  uint64_t nbytes = 0;
  /// Keeps `data` valid; the bytes must not change while it is shared with a
  /// send that has not completed.
  std::shared_ptr<const void> owner;
  /// Signals that the bytes are there (transport/device_ops.hpp); null: they
  /// are. They must not be read before.
  std::shared_ptr<device_event> ready = {};
  /// The sender's device that it lay on, while it is in flight in host memory:
  /// the receiver places it on a device again.
  device_ref home = {};
  /// The bytes do not travel: `data` says where the sender's device has them
  /// for the receiver's (actors/comm/device_arenas.hpp).
  bool lent = false;
  /// Why the receiver could not place it on a device, so that nobody can read
  /// it; null: it could, or has no such device.
  std::shared_ptr<const failure> unplaced = {};
};

/// Tells whether a tensor of `sizes` with these strides is dense: its elements
/// follow each other without gaps, in some order of its axes.
inline bool are_strides(const std::vector<int64_t>& strides,
                        const std::vector<int64_t>& sizes) {
  if (strides.size() != sizes.size())
    return false;
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (size_t i = 0; i < sizes.size(); ++i)
    axes.emplace_back(strides[i], sizes[i]);
  std::sort(axes.begin(), axes.end());
  int64_t next = 1;
  for (auto& [stride, size] : axes)
    if (stride != next
        || (size > 1 && __builtin_mul_overflow(next, size, &next)))
      return false;
  return true;
}

/// Opaque bytes with the tensors that they refer to, by position.
struct payload {
  std::vector<std::byte> bytes;
  std::vector<tensor_ref> tensors;
};

/// @returns the sum of the tensors' sizes, in bytes.
inline uint64_t tensor_bytes(const payload& x) noexcept {
  uint64_t result = 0;
  for (auto& t : x.tensors)
    result += t.nbytes;
  return result;
}

} // namespace smp
