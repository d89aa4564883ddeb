#pragma once

#include "partition/search/problem.hpp"

namespace smp {

/// The paper's decision, and the devices that it gave to nodes that cannot use
/// them (a node without children runs on the first of its devices).
struct paper_decision {
  struct surplus {
    size_t node;
    std::vector<uint32_t> devices;
  };
  assignment devices;
  std::vector<surplus> idle;
};

/// Algorithms 1 to 3 of the paper, as printed where they are unambiguous.
/// Interpretation of the rest:
/// - costs in the recursion are those of subtrees, each module counted once;
/// - a node's own cost is ignored while its devices are distributed among its
///   children, although it runs on the first of them;
/// - a node has as many segments as it has devices or children, whichever is
///   fewer, and none is empty;
/// - a segment without a device gets the first device of the current set.
/// Pinned nodes are ignored: the others are partitioned as if they were alone.
paper_decision paper_partition(const partition_problem& p);

} // namespace smp
