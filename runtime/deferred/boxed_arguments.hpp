#pragma once

// Shared by the dispatcher fallbacks for tensors without bytes
// (placeholder.cpp, deferred_init.cpp): arguments arrive boxed, on a stack.

#include "runtime/values/absent_tensor.hpp"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace smp {

/// Operations that only read sizes and types need no bytes.
inline bool reads_metadata_only(std::string_view name) {
  static constexpr std::array<std::string_view, 12> names = {
    "aten::size",       "aten::stride",       "aten::dim",
    "aten::numel",      "aten::sym_size",     "aten::sym_numel",
    "aten::sym_stride", "aten::is_same_size", "aten::is_floating_point",
    "aten::is_complex", "aten::is_signed",    "aten::retains_grad",
  };
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Replaces every tensor in `value` with `f(x)`. `value` may be a tensor,
/// a list of tensors, a list of optional tensors or anything else.
/// Undefined tensors stay.
template <class F>
void replace_tensors(c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (auto& x : value.toTensorVector())
      result.push_back(x.defined() ? at::Tensor{f(x)} : x);
    value = result;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (std::optional<at::Tensor> x : value.toOptionalTensorList())
      result.push_back(x && x->defined() ? std::optional<at::Tensor>{f(*x)}
                                         : x);
    value = result;
  }
}

/// Calls `f(x)` with every defined tensor in `value`.
template <class F>
void visit_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      f(value.toTensor());
  } else if (value.isTensorList()) {
    for (auto& x : value.toTensorVector())
      if (x.defined())
        f(x);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<at::Tensor> x : value.toOptionalTensorList())
      if (x && x->defined())
        f(*x);
  }
}

/// @returns the arguments on top of `stack`, to be held until the call is over.
/// Operators with several `out` arguments return references to them, and
/// LibTorch (2.11) follows these only after it popped the arguments off the
/// stack: without another owner, they refer to freed memory.
inline torch::jit::Stack held_arguments(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack) {
  auto& schema = op.schema();
  if (schema.returns().size() < 2)
    return {};
  auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  return {stack.end() - count, stack.end()};
}

/// Calls the operator with the arguments on top of `stack`.
inline void call_boxed(const c10::OperatorHandle& op,
                       torch::jit::Stack& stack) {
  auto held = held_arguments(op, stack);
  op.callBoxed(&stack);
}

/// The same from the middle of a dispatch, with the kernel for `keys`.
inline void redispatch_boxed(const c10::OperatorHandle& op,
                             c10::DispatchKeySet keys,
                             torch::jit::Stack& stack) {
  auto held = held_arguments(op, stack);
  op.redispatchBoxed(keys, &stack);
}

/// `key_set_` is protected; a derived class may name it.
struct key_access : c10::TensorImpl {
  static constexpr auto key_set() {
    return &key_access::key_set_;
  }
};

} // namespace smp
