#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace smp {

/// oneDNN multiplies half-precision matrices where the CPU has instructions for
/// it (on x86: AVX-512). Elsewhere LibTorch uses its own loops, which are up to
/// a hundred times slower than float32.
/// @returns a user remark if this CPU lacks instructions for `x`, else nothing
std::string remark_on_half_precision(c10::ScalarType x);

} // namespace smp
