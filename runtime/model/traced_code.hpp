#pragma once

// A trace has sizes and the training mode of one run fixed in its code, which
// training then meets.

#include "runtime/model/module_walk.hpp"

#include <torch/csrc/jit/ir/ir.h>

#include <cstdint>
#include <string>

namespace smp {

/// @returns a warning if the code of a TorchScript model drops nothing or
/// learns no statistics whatever its mode is, as it was traced in evaluation
/// mode; empty for other models
std::string warning_of_evaluation(const walked_model& x);

/// Tells whether the code gives some tensor this size as a number, as
/// `x.view(8, -1)` does with 8.
bool fixes_size(const torch::jit::Graph& x, int64_t size);

/// Tells whether parameters or buffers have another type than float32. The
/// gradients that TorchScript derives for optimised code ignore that types
/// differ: after `softmax(x, -1, dtype=torch.float)` of bfloat16 it multiplies
/// one with the other (AD_matmul_bw_size) and fails. Code in float32 alone, as
/// nearly all is, has no such place.
bool has_mixed_types(const walked_model& x);

} // namespace smp
