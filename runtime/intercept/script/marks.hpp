#pragma once

#include <ATen/core/jit_type.h>

#include <vector>

namespace smp {

/// Lets the `call_observer` of a thread hear of the calls of all methods of
/// these classes, without their tensors. The code stays as it is but for a mark
/// where a method begins and one where it ends: for runs in one process that
/// must pass through nothing of the pipeline (R36). Once, and before a method
/// first ran.
void mark_methods(const std::vector<c10::ClassTypePtr>& classes);

} // namespace smp
