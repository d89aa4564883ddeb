#pragma once

#include "partition/problem.hpp"

namespace smp {

/// A pipeline of p devices idles while it fills and drains, which takes p - 1
/// stages there and back. With v chunks per device a stage is a v-th as long,
/// and so is that time: bubble = (p - 1) / (v m + p - 1) of a step of m
/// microbatches, for v times as many messages (Narayanan et al. 2021, section
/// 2.2).
struct chunked_decision {
  assignment devices;
  assignment chunks; // by node
};

/// Splits the execution order into `chunks` x devices consecutive pieces and
/// deals them out in turn. Of several grains takes the one with the fewest
/// requests among those whose largest load is within the tolerance of the best
/// (see `communication`). What comes last may go back to the root's device.
/// @param chunks at least 1
chunked_decision chunked_partition(const partition_problem& p,
                                   const communication& crossing,
                                   uint32_t chunks);

} // namespace smp
