#pragma once

#include "partition/problem.hpp"

namespace smp {

/// The paper's decision, and the devices that it gave to a node that cannot
/// use them (a node without children runs on the first of its devices).
struct paper_decision {
  struct surplus {
    size_t node;
    std::vector<uint32_t> devices;
  };
  assignment devices;
  std::vector<surplus> idle;
};

/// Algorithms 1 to 3 of the paper, as printed where they are clear. Readings
/// where they are not:
/// - costs within the recursion are of subtrees, each module counted once;
/// - a node's own cost does not count while its devices are shared among its
///   children, though it lands on the first of them;
/// - a node has as many segments as it has devices or children, whichever is
///   less, and none is empty;
/// - a segment without a device goes to the first device of the set at hand.
/// Pinned nodes take no part: the others are partitioned as if they were alone.
paper_decision paper_partition(const partition_problem& p);

} // namespace smp
