#pragma once

// Runs a call of a user's class by a distributed module that has other
// arguments and results.

#include "tp/distributed_module.hpp"
#include "transport/error.hpp"

#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace at {
class Tensor;
} // namespace at

namespace c10 {
struct IValue;
} // namespace c10

namespace torch::nn {
class AnyValue;
} // namespace torch::nn

namespace smp {

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

/// The same for a class of TorchScript files.
class script_translation {
public:
  virtual ~script_translation() = default;

  /// @param arguments of its `forward`, without the object
  /// @returns what `forward` returns
  /// @throws error (user_code) if the hooks take other arguments
  virtual c10::IValue call(const distributed_module& how,
                           const std::vector<c10::IValue>& arguments) const = 0;
};

/// A distributed module of a class whose calls have to be translated.
class translated_module final : public distributed_module {
public:
  translated_module(std::unique_ptr<distributed_module> inner,
                    std::shared_ptr<const script_translation> calls)
    : inner_(std::move(inner)), calls_(std::move(calls)) {
    // nop
  }

  std::vector<at::Tensor> forward(std::span<const at::Tensor>) const override {
    throw error{error_code::internal, "a call without its translation"};
  }

  c10::IValue call(const std::vector<c10::IValue>& arguments) const;

private:
  std::unique_ptr<distributed_module> inner_;
  std::shared_ptr<const script_translation> calls_;
};

/// @returns the tensors in TorchScript's `xs`, also those in tuples, lists and
/// dictionaries, in order
std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& xs);

/// @returns what code of a file gets of a shared module that gave `xs`: a
/// tensor, or a tuple of them
c10::IValue script_result(const std::vector<at::Tensor>& xs);

} // namespace smp
