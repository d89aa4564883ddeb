#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <set>
#include <string>

namespace smp {

/// What LibTorch's classes for any device cannot say of one. Thread-safe.
class accelerator {
public:
  virtual ~accelerator() = default;

  virtual c10::DeviceType type() const = 0;

  /// Calls `f` on a thread of the driver when `x` gets to this point. It must
  /// neither wait nor use the device.
  virtual void notify(c10::Stream x, std::function<void()> f) = 0;

  // -- memory that other processes of the machine may read --------------------

  /// An allocation of its own: what LibTorch's allocator gives may be a part of
  /// one, or of a kind that cannot be shared. It stays until the process ends:
  /// drivers forbid to free what another process has open.
  /// @returns null if the device has not that much
  virtual void* allocate_shared(c10::DeviceIndex device, size_t bytes) = 0;

  /// @returns what another process needs to open it, opaque bytes; empty: this
  /// memory cannot be shared
  virtual std::string export_shared(void* x) = 0;

  /// @param exported by another process of this machine, which is alive
  /// @returns where the device finds that memory; null: it cannot reach it
  virtual void* open_shared(c10::DeviceIndex device,
                            const std::string& exported)
    = 0;

  virtual void close_shared(void* opened) = 0;
};

/// From now on `name` may stand in `smp.device`: a device belongs to the
/// process, as LibTorch's does.
/// @pre LibTorch knows devices of its type
void add_accelerator(std::string name, std::shared_ptr<accelerator> x);

/// @returns null if there is none of that name
std::shared_ptr<accelerator> find_accelerator(const std::string& name);

std::set<std::string> accelerator_names();

} // namespace smp
