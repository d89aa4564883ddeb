#include "partition/search/chain.hpp"

#include "partition/search/segment.hpp"

#include <algorithm>

namespace smp {

std::vector<uint32_t> split_chain(const partition_problem& p, double grain,
                                  uint32_t pieces) {
  std::vector<size_t> begins; // of subtrees and nodes that stay whole
  std::vector<exact_cost> prefix{0};
  for (size_t i = 0; i < p.tree.size();) {
    auto end = i + 1;
    if (i > 0 && p.costs.share(p.costs.subtree(i)) <= grain)
      end = p.tree[i].subtree_end;
    begins.push_back(i);
    prefix.push_back(prefix.back());
    for (; i < end; ++i)
      if (!p.fixed[i])
        prefix.back() += p.costs.own(i);
  }
  auto parts = std::min<size_t>(pieces, begins.size());
  auto ends = min_max_split(prefix, parts);
  begins.push_back(p.tree.size());
  std::vector<uint32_t> result(p.tree.size());
  size_t first = 0;
  for (uint32_t piece = 0; piece < parts; ++piece) {
    for (auto i = begins[first]; i < begins[ends[piece]]; ++i)
      result[i] = piece;
    first = ends[piece];
  }
  return result;
}

} // namespace smp
