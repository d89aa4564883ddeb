#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// Dispatch key of tensors whose bytes another rank has: placeholders of its
/// parameters (lazy/placeholder.hpp), promises (lazy/promise.hpp) and values in
/// flight (lazy/late_value.hpp). Unused in LibTorch 2.11: nothing else
/// registers a fallback for it. It ranks above autograd and autocast, so that
/// both see the value.
inline constexpr auto absent_key = c10::DispatchKey::
  TESTING_ONLY_GenericWrapper;

/// Tells whether another rank has the bytes of `x`: any access to them waits
/// until they are here.
inline bool is_absent(const at::Tensor& x) {
  return x.defined() && x.key_set().has(absent_key);
}

} // namespace smp
