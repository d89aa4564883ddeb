#pragma once

#include <ATen/core/jit_type.h>

#include <vector>

namespace smp {

/// Lets a thread's `call_observer` see the calls of all methods of these
/// classes, without their tensors. The code is unchanged except for a mark at
/// the start and end of each method: for single-process runs that must not go
/// through any part of the pipeline (R36). Call once, before any method first
/// runs.
void mark_methods(const std::vector<c10::ClassTypePtr>& classes);

} // namespace smp
