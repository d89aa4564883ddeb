#pragma once

#include "transport/tensor_ref.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace smp {

/// A point in the work of a device: it is there when all before it is done.
class device_event {
public:
  virtual ~device_event() = default;

  /// Waits for at most `limit`; 0 only looks. Thread-safe.
  /// @returns whether the device came to this point
  /// @throws error if it never will
  virtual bool wait(std::chrono::milliseconds limit) = 0;
};

/// Whom the devices of a rank reach without the host.
struct device_links {
  /// The devices of the other ranks on their node.
  bool peer_access = false;
  /// Those of other nodes, through the network.
  bool rdma = false;
};

/// Memory and copies of whatever devices a rank has, so that who moves tensors
/// knows no library of any. Thread-safe.
class device_ops {
public:
  virtual ~device_ops() = default;

  /// The same at any time.
  virtual device_links links() const = 0;

  /// @returns where on this rank a tensor comes to lie that another rank had on
  /// its device `x`; nothing: this rank has none of that type.
  virtual std::optional<device_ref> here(device_ref x) const = 0;

  /// @returns memory for `size` bytes at a place that `here` gave, contents
  /// undefined; of the host, it is what the devices copy fast.
  /// @throws error (unsupported) for any other place, std::bad_alloc
  virtual std::shared_ptr<std::byte>
  allocate(device_ref where, uint64_t size) = 0;

  /// Begins to copy the bytes of `from`, as soon as they are there, and keeps
  /// both memories until it is done. From host memory to host memory it is done
  /// at once, @pre they are there.
  /// @param to memory at `where` for all of it
  /// @returns `from` in its new place, with an event of its own
  /// @throws error
  virtual tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                          device_ref where)
    = 0;
};

/// Those of a rank without devices.
class host_ops final : public device_ops {
public:
  device_links links() const override;

  std::optional<device_ref> here(device_ref x) const override;

  std::shared_ptr<std::byte> allocate(device_ref where, uint64_t size) override;

  tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                  device_ref where) override;
};

} // namespace smp
