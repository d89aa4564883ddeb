#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

class model_map;

/// Gradients of the parameters that this rank owns, as they were before a step:
/// where the step is taken back, it has to add to the same ones once more.
/// Costs a copy of those that exist; after `zero_grad` there are none.
class kept_gradients {
public:
  void keep(const model_map& map);

  /// Makes the gradients what they were at the last `keep`, in the same
  /// tensors, and forgets them.
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
