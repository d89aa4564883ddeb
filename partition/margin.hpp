#pragma once

#include "partition/partitioner.hpp"

#include <cstddef>

namespace smp {

/// Measured times have errors, and the next run has others: where two
/// partitions are about as good, either may come out.
/// @param error that a time may have, as a part of it
/// @returns how many modules would be elsewhere, at most, if each kind of
///          module took so much more or less; 0: the decision stands
size_t undecided_modules(const model_info& model, const partition_plan& plan,
                         double error);

} // namespace smp
