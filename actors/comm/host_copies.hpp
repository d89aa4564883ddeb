#pragma once

#include "transport/device_ops.hpp"
#include "transport/tensor_ref.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>

namespace smp {

/// Tensors of a device that leave through host memory. One that goes to several
/// ranks, as a part of a collective, is copied there once: its bytes at the
/// same point of the device are the same, as whoever sends it keeps them until
/// they have left. Thread-safe.
class host_copies {
public:
  /// @returns a copy of `x` that is in use, perhaps not ready; nothing: there
  /// is none
  std::optional<tensor_ref> find(const tensor_ref& x);

  /// @param copy of `x`, in host memory
  void add(const tensor_ref& x, const tensor_ref& copy);

private:
  struct entry {
    std::shared_ptr<device_event> point; // so that no other has its address
    tensor_ref copy;                     // without its owner
    std::weak_ptr<const void> owner;
  };

  using place = std::tuple<const void*, uint64_t, const device_event*>;

  std::mutex mutex_;
  std::map<place, entry> entries_; // guarded by mutex_
};

} // namespace smp
