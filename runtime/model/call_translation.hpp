#pragma once

// The call of a class of the user's, done by a distributed module that takes
// and gives something else.

#include <vector>

namespace at {
class Tensor;
} // namespace at

namespace torch::nn {
class AnyValue;
} // namespace torch::nn

namespace smp {

class distributed_module;

/// Makes what `forward` of a class returns, for a child of a Sequential, of the
/// tensors that are in it.
using child_result = torch::nn::AnyValue (*)(const std::vector<at::Tensor>& xs);

/// Between `forward` of a class that was registered with hooks and a
/// distributed module of it (see `tp_register`).
class call_translation {
public:
  virtual ~call_translation() = default;

  /// @param arguments `detail::forward_form<Module>::arguments`
  /// @param result a `std::optional` of what `forward` returns
  virtual void call(const distributed_module& how, void* arguments,
                    void* result) const = 0;

  /// The same for a child of a Sequential.
  virtual torch::nn::AnyValue
  call_child(const distributed_module& how,
             std::vector<torch::nn::AnyValue>&& arguments) const = 0;
};

} // namespace smp
