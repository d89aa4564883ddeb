#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::sim {

struct shape {
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

shape shape_of(const at::Tensor&);

/// Of what a call returns.
struct result_shapes {
  /// Lists flattened.
  std::vector<shape> tensors;
  /// Per returned value.
  std::vector<int64_t> lengths;
};

/// In result_shapes::lengths.
constexpr int64_t one_tensor = -1;
constexpr int64_t no_tensor = -2;

result_shapes shapes_of(c10::ArrayRef<c10::IValue> results);

/// The defined tensors among them, lists flattened.
std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue>);

/// @returns the same value with `f` applied to each defined tensor in it
template <class F>
c10::IValue map_tensors(const c10::IValue& x, const F& f) {
  auto mapped = [&](const at::Tensor& t) { return t.defined() ? f(t) : t; };
  if (x.isTensor())
    return mapped(x.toTensor());
  if (x.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& t : x.toTensorVector())
      result.push_back(mapped(t));
    return result;
  }
  // Not isOptionalTensorList: TorchScript has objects of its own for that type.
  if (x.isList()
      && *x.toList().elementType() == *c10::OptionalType::ofTensor()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const auto& t : x.toListRef())
      result.push_back(t.isTensor() ? std::optional{mapped(t.toTensor())}
                                    : std::nullopt);
    return result;
  }
  return x;
}

/// Whether everything that the operator returns is tensors.
bool returns_only_tensors(const c10::FunctionSchema&);

/// Everything that the shape of a result may depend on, but for the values of
/// tensors.
std::string signature(const c10::OperatorHandle&,
                      c10::ArrayRef<c10::IValue> arguments);

/// The shapes that calls of such a signature gave. May be called on any thread.
std::optional<result_shapes> remembered_shapes(const std::string& signature);

void remember_shapes(const std::string& signature, const result_shapes&);

} // namespace smp::sim
