#include "partition/search/segment.hpp"

#include <algorithm>

namespace smp {

namespace {

using sums = std::span<const exact_cost>;

/// Result of packing the elements into segments of at most `capacity`.
struct packing {
  bool fits = false;
  exact_cost largest = 0; // of the segments, if it fits
  exact_cost next = 0;    // smallest capacity that packs differently, if not
};

/// Fills one segment after the other, which needs the fewest segments.
packing pack(sums prefix, size_t parts, exact_cost capacity) {
  packing result;
  result.next = prefix.back() - prefix.front();
  auto n = prefix.size() - 1;
  size_t begin = 0;
  for (size_t part = 0; part < parts && begin < n; ++part) {
    auto end = std::upper_bound(prefix.begin() + begin + 1, prefix.end(),
                                prefix[begin] + capacity)
               - prefix.begin() - 1;
    if (static_cast<size_t>(end) < n)
      result.next = std::min(result.next, prefix[end + 1] - prefix[begin]);
    result.largest = std::max(result.largest, prefix[end] - prefix[begin]);
    begin = static_cast<size_t>(end);
  }
  result.fits = begin == n;
  return result;
}

/// @returns the smallest possible largest sum of `parts` segments. Empty
///          segments change nothing here: splitting never makes a sum larger.
exact_cost smallest_capacity(sums prefix, size_t parts, exact_cost low,
                             exact_cost high) {
  // Both ends move to sums that occur, so few rounds suffice.
  while (low < high) {
    auto x = pack(prefix, parts, low + (high - low) / 2);
    if (x.fits)
      high = x.largest;
    else
      low = x.next;
  }
  return low;
}

} // namespace

std::vector<size_t> min_max_split(sums prefix, size_t parts) {
  std::vector<size_t> ends(parts);
  auto end = prefix.size() - 1;
  exact_cost optimum = prefix.back() - prefix.front();
  for (auto part = parts; part-- > 0;) {
    ends[part] = end;
    if (part == 0)
      break;
    auto head = prefix.first(end + 1);
    auto sum = head.back() - head.front();
    auto low = (sum + part) / (part + 1);
    optimum = smallest_capacity(head, part + 1, low, std::min(sum, optimum));
    // The first split point whose last segment is within the optimum. What is
    // before it is within the optimum too: it is no longer than the head of
    // the optimal split.
    auto least = head.back() <= optimum ? 0 : head.back() - optimum;
    auto first = std::lower_bound(head.begin() + part, head.end() - 1, least);
    end = static_cast<size_t>(first - head.begin());
  }
  return ends;
}

std::vector<std::vector<uint32_t>> allot(std::span<const uint32_t> devices,
                                         std::span<const exact_cost> costs) {
  std::vector<std::vector<uint32_t>> result(costs.size());
  for (auto device = devices.rbegin(); device != devices.rend(); ++device) {
    size_t best = 0;
    for (size_t i = 1; i < costs.size(); ++i)
      if (costs[i] * (result[best].size() + 1)
          > costs[best] * (result[i].size() + 1))
        best = i;
    result[best].push_back(*device);
  }
  for (auto& xs : result)
    std::reverse(xs.begin(), xs.end());
  return result;
}

} // namespace smp
