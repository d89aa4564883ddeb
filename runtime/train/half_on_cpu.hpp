#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace smp {

/// oneDNN multiplies matrices of half precision where the CPU has instructions
/// that do (of x86: AVX-512). Elsewhere LibTorch does so by loops of its own
/// that are slower than float32 by a factor of up to a hundred.
/// @returns a remark for the user if this CPU has none for `x`, else nothing
std::string remark_on_half_precision(c10::ScalarType x);

} // namespace smp
