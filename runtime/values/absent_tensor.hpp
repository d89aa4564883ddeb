#pragma once

#include <ATen/core/Tensor.h>

namespace smp {

/// Of tensors whose bytes another rank has: placeholders of its parameters
/// (lazy/placeholder.hpp), promises (lazy/promise.hpp) and what is on its way
/// (lazy/late_value.hpp). Free in LibTorch
/// 2.11: nothing else registers a fallback for it, and it ranks above autograd
/// and autocast, so that the value meets both.
inline constexpr auto absent_key = c10::DispatchKey::
  TESTING_ONLY_GenericWrapper;

/// Tells whether another rank has the bytes of `x`: whoever looks at them waits
/// for them.
inline bool is_absent(const at::Tensor& x) {
  return x.defined() && x.key_set().has(absent_key);
}

} // namespace smp
