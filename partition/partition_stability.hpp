#pragma once

#include "partition/partitioner.hpp"

#include <cstddef>

namespace smp {

/// Measured times have errors and vary between runs: if two partitions are
/// about equally good, either may result.
/// @param error the relative error that a time may have
/// @returns the largest number of modules that move if each kind of module
///          takes longer or shorter by that error; 0: the decision is stable
size_t undecided_modules(const model_info& model, const partition_plan& plan,
                         double error);

} // namespace smp
