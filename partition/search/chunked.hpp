#pragma once

#include "partition/search/problem.hpp"

namespace smp {

/// A pipeline of p devices is idle while it fills and drains, for the time of
/// p - 1 stages in each phase. With v chunks per device a stage takes a v-th of
/// the time, and so does the idle time: bubble = (p - 1) / (v m + p - 1) in a
/// step of m microbatches, at the price of v times as many messages (Narayanan
/// et al. 2021, section 2.2).
struct chunked_decision {
  assignment devices;
  assignment chunks; // by node
};

/// Splits the execution order into `chunks` x devices consecutive pieces and
/// deals them out in turn. Of several grains takes the one with the fewest
/// requests among those whose largest load is within the tolerance of the best
/// (see `communication`). The last nodes may move to the root's device.
/// @param chunks at least 1
chunked_decision chunked_partition(const partition_problem& p,
                                   const communication& crossing,
                                   uint32_t chunks);

} // namespace smp
