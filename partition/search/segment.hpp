#pragma once

// The two steps of the paper's algorithm 2: segments, and devices for them.

#include "partition/search/cost.hpp"

#include <span>

namespace smp {

/// Splits a sequence into consecutive, non-empty segments such that the largest
/// sum of a segment is as small as possible. Of all such splits takes the one
/// that the paper's recursion finds: from the last segment backwards, each
/// begins as early as the optimum of the elements before it allows.
///
/// The recursion as printed takes n^2 x k steps: minutes for 20,000 children.
/// Its optimum is monotonic, so a search over capacities finds the same split
/// in about k^2 x log(n) steps.
/// @param prefix n + 1 numbers: sums of the first 0, 1, ... n elements.
/// @param parts number of segments, 1 to n.
/// @returns the end of each segment; the last one is n.
std::vector<size_t> min_max_split(std::span<const exact_cost> prefix,
                                  size_t parts);

/// Distributes devices among segments in proportion to their costs (algorithm
/// 3, D'Hondt's method): the highest device first, each to the segment with the
/// largest cost / (devices + 1); ties go to the first segment.
/// @param devices ascending.
/// @returns the devices of each segment, ascending.
std::vector<std::vector<uint32_t>> allot(std::span<const uint32_t> devices,
                                         std::span<const exact_cost> costs);

} // namespace smp
