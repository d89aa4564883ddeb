#pragma once

#include "transport/collectives/elements.hpp"
#include "transport/tensor_ref.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace smp {

/// A point in the work of a device, reached when all work before it is done.
class device_event {
public:
  virtual ~device_event() = default;

  /// Calls `f` once the device is there: at once, or on a thread of the device,
  /// which must neither wait nor use a device. Never, if the device failed.
  /// Thread-safe.
  virtual void then(std::function<void()> f) = 0;

  /// Tells whether the device has failed. Not on a thread of the device.
  virtual bool failed() const {
    return false;
  }
};

/// Memory of a device that devices of other ranks of the machine can read.
struct shared_memory {
  std::shared_ptr<std::byte> bytes; // null: there is none
  uint64_t size = 0;
  device_ref device;
  /// What `open` of another rank needs to know of it; opaque bytes.
  std::string handle;
};

/// What becomes of the tensors of several ranks (elements.hpp).
struct combination {
  element_type type = element_type::uint8;
  reduce_op op = reduce_op::sum;
  uint64_t count = 0;                   // elements of each
  std::optional<uint64_t> divisor = {}; // of the sum, for a mean
};

/// Memory and copies for the devices of a rank, whatever they are, so that code
/// that moves tensors depends on no device library. Thread-safe.
class device_ops {
public:
  virtual ~device_ops() = default;

  /// Whether the network can read and write the memory of the devices. The
  /// result never changes.
  virtual bool rdma() const {
    return false;
  }

  /// Tells whether the device of this rank has failed.
  virtual bool failed() const {
    return false;
  }

  /// Makes memory of the device of this rank, an allocation of its own.
  /// @returns none if the device shares none, or has not that much
  virtual shared_memory share(uint64_t size);

  /// @param handle of what another rank of this machine shares
  /// @returns that memory, none if the device of this rank cannot reach it
  virtual shared_memory open(const std::string& handle);

  /// @returns the device of this rank for a tensor that another rank has on its
  /// device `x`; nothing if this rank has no device of that type.
  virtual std::optional<device_ref> here(device_ref x) const = 0;

  /// @returns uninitialized memory for `size` bytes at a place that `here`
  /// gave; on the host, it is memory that the devices copy fast.
  /// @throws error (unsupported) for any other place, std::bad_alloc
  virtual std::shared_ptr<std::byte>
  allocate(device_ref where, uint64_t size) = 0;

  /// Starts to copy the bytes of `from` as soon as they are ready. The caller
  /// keeps both memories alive until it is done. A copy from host to host is
  /// done at once, @pre the bytes are ready.
  /// @param from may lie in memory that `open` gave
  /// @param to memory at `where`, large enough for all bytes
  /// @returns `from` in its new place, with an event of its own
  /// @throws error
  virtual tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                          device_ref where)
    = 0;

  // -- sums on the device of this rank ----------------------------------------

  /// @returns uninitialized memory there for what `combine` makes
  /// @throws std::bad_alloc
  virtual std::shared_ptr<std::byte> allocate_sum(uint64_t size);

  /// Starts to do what `smp::combine` does, with the same bits; of one input,
  /// to copy it. All memories are there, and the caller keeps them alive until
  /// it is done.
  /// @param to may be one of `inputs`, and else overlaps none
  /// @param after when the memories may be used; null: now
  /// @returns when it is done; calls back even if the device fails
  /// @throws error, std::bad_alloc
  virtual std::shared_ptr<device_event>
  combine(const combination& x, std::byte* to,
          std::span<const void* const> inputs,
          const std::shared_ptr<device_event>& after);
};

/// The operations of a rank without devices.
class host_ops final : public device_ops {
public:
  std::optional<device_ref> here(device_ref x) const override;

  std::shared_ptr<std::byte> allocate(device_ref where, uint64_t size) override;

  tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                  device_ref where) override;
};

} // namespace smp
