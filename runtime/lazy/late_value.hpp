#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace smp {

/// Makes every access to the content of `x`, through any handle, wait until the
/// bytes still in flight have arrived. Apart from that `x` stays an ordinary
/// tensor: same memory, same place in the autograd graph. The writer must make
/// its views of `x` before this call. (The key set of `x` gets `absent_key`,
/// which leads each operation to `await_late` first.)
/// @param arrive returns when all bytes are there; may park, and may be called
/// several times. If it throws, the operation rethrows, and `x` stays late
void make_late(const at::Tensor& x, std::function<void()> arrive);

/// Tells whether `x` is late: after `make_late`, until a wait finishes.
bool is_late(const at::Tensor& x);

/// Waits, if `x` is late. @throws what its `arrive` throws
void await_late(const at::Tensor& x);

/// Stops `x` from being late without a wait, whatever it holds.
void forget_late(const at::Tensor& x);

} // namespace smp
