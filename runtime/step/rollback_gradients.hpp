#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

class model_map;

/// Saves the gradients of this rank's parameters as they were before a step: a
/// step that is rolled back and rerun must add to the same gradients again.
/// Costs a copy of those that exist; after `zero_grad` none do.
class rollback_gradients {
public:
  void keep(const model_map& map);

  /// Restores the gradients as of the last `keep`, in the same tensors, and
  /// drops the saved ones.
  void put_back();

  void drop() noexcept {
    kept_.clear();
  }

private:
  struct entry {
    at::Tensor parameter;
    at::Tensor gradient; // undefined: there was none
    at::Tensor content;
  };

  std::vector<entry> kept_;
};

} // namespace smp
