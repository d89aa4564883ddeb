#pragma once

#include <c10/core/Stream.h>

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
};

/// From now on `name` may stand in `smp.device`: a device belongs to the
/// process, as LibTorch's does.
/// @pre LibTorch knows devices of its type
void add_accelerator(std::string name, std::shared_ptr<accelerator> x);

/// @returns null if there is none of that name
std::shared_ptr<accelerator> find_accelerator(const std::string& name);

std::set<std::string> accelerator_names();

} // namespace smp
