#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace smp {

/// Moves tensors to a device in place: every handle on them sees the same
/// tensor there. Those that share memory do so afterwards, with the same
/// sizes and strides. The largest are moved first, and the memory that they
/// leave is free at once, unless a tensor that is not among `xs` shares it.
/// @throws c10::OutOfMemoryError if there is no room; some may have been moved
void move_in_place(std::vector<at::Tensor> xs, c10::Device to);

} // namespace smp
