#pragma once

// Between the tensor library and the bytes that transport/ moves.

#include "transport/tensor_ref.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// @returns why `x` cannot be sent: "a sparse tensor cannot be sent to another
/// rank"; empty if it can
std::string refusal_of(const at::Tensor& x);

/// @returns a hash of the bits of `x`, so that NaN equals itself; nothing for a
/// tensor that cannot be sent
std::optional<uint64_t> hash_bits(const at::Tensor& x);

/// @returns the strides of `x` on the receiving rank (R63): without gaps, with
/// the same order of axes in memory, as `at::empty_like` has them; empty if
/// that is row-major.
std::vector<int64_t> dense_strides(const at::Tensor& x);

/// @returns where a tensor of another rank comes to lie on that of the calling
/// thread: on its device, or in host memory
/// @throws error (unsupported) if it has no device of that type
at::Device device_here(const tensor_meta& x);

/// Describes `x` as bytes without gaps, with its `dense_strides`. Shares memory
/// with `x` if that has no gaps, else copies; resolves conjugate and negative
/// bits, and leaves autograd behind. `owner` keeps the memory alive. On a
/// device, `ready` follows what the calling thread launched.
/// @param snapshot always copy: another microbatch may write `x` (R13)
/// @throws error (unsupported) naming dtype, layout or device: sparse,
///         quantised and nested tensors, tensors without memory (meta), and
///         those on a device other than that of the rank
tensor_ref to_tensor_ref(const at::Tensor& x, bool snapshot);

/// Makes a tensor over the memory of `x`; copies only if that is
/// misaligned for its element type. The result is writable: no other code
/// may use the memory. What the calling thread launches from now on waits for
/// its bytes.
/// @throws error (protocol) if dtype, shape, strides and size do not fit
///         together; `tensor_ref::unplaced`
at::Tensor to_tensor(const tensor_ref& x);

} // namespace smp
