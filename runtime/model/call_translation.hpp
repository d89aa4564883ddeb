#pragma once

// Runs a call of a user's class by a distributed module that has other
// arguments and results.

#include <vector>

namespace at {
class Tensor;
} // namespace at

namespace torch::nn {
class AnyValue;
} // namespace torch::nn

namespace smp {

class distributed_module;

/// Builds the result of a class's `forward`, for a child of a Sequential, from
/// the tensors in it.
using child_result = torch::nn::AnyValue (*)(const std::vector<at::Tensor>& xs);

/// Translates between `forward` of a class that was registered with hooks and a
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
