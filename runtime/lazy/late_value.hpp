#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace smp {

/// Lets whoever touches the content of `x`, through any handle on it, wait for
/// bytes that others still write there. It remains an ordinary tensor beside
/// that: same memory, same place in the autograd graph. Views of `x` have to be
/// made by whoever fills it, before this. (Its key set gets `absent_key`, which
/// leads each operation to `await_late` first.)
/// @param arrive returns when all is there; may park, may be called several
///        times. What it throws, the operation throws, and `x` stays late
void make_late(const at::Tensor& x, std::function<void()> arrive);

/// Tells whether `make_late` was called for `x`, and nobody waited since.
bool is_late(const at::Tensor& x);

/// Waits, if `x` is late. @throws what its `arrive` throws
void await_late(const at::Tensor& x);

/// Nobody waits for `x` any more, whatever it holds.
void forget_late(const at::Tensor& x);

} // namespace smp
