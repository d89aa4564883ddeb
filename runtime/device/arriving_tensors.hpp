#pragma once

#include "runtime/device/storage_copies.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace smp {

/// Tensors of the host on their way to a device, beside its kernels. Keeps what
/// the copies read, so it ends after the work that finds them there.
class arriving_tensors {
public:
  /// Begins to copy. What is not there as plain memory stays on the host.
  /// @throws c10::OutOfMemoryError
  arriving_tensors(const storage_copies& copies, std::vector<at::Tensor> xs);

  /// @returns all tensors, for what is launched from now on. May be called
  /// once.
  std::vector<at::Tensor> take();

private:
  struct moving {
    size_t index = 0;
    at::Tensor pinned;
    std::unique_ptr<lent_storage> there;
  };

  std::vector<at::Tensor> xs_;
  std::vector<moving> moving_;
};

} // namespace smp
