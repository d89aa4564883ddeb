#pragma once

#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"

#include <ATen/core/Tensor.h>

#include <optional>

namespace smp {

/// A tensor in a value that programs send each other, by content; it may be
/// undefined.
/// @throws error as `to_tensor_ref` and `to_tensor`
template <class Inspector>
bool inspect(Inspector& f, at::Tensor& x) {
  auto get = [&x] {
    return x.defined() ? std::optional{to_tensor_ref(x.detach(), true)}
                       : std::nullopt;
  };
  auto set = [&x](const std::optional<tensor_ref>& y) {
    x = y ? to_tensor(*y) : at::Tensor{};
    return true;
  };
  return f.object(x).fields(f.field("tensor", get, set));
}

} // namespace smp
