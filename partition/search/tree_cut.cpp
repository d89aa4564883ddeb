#include "partition/search/tree_cut.hpp"

#include <algorithm>
#include <numeric>

namespace smp {

namespace {

/// Cuts off the heaviest subtrees until no part costs more than `bound`; of all
/// ways to do so none cuts fewer edges.
/// @returns by node whether it begins a part
std::vector<bool> cuts_of(const partition_problem& p, double bound) {
  auto n = p.tree.size();
  std::vector<bool> result(n);
  std::vector<exact_cost> left(n); // in the part, of the subtree
  // Nodes are in preorder, so this visits children before their parents.
  for (auto i = n; i-- > 0;) {
    auto children = p.tree[i].children;
    std::sort(children.begin(), children.end(),
              [&left](size_t x, size_t y) { return left[x] > left[y]; });
    left[i] = p.costs.own(i);
    for (auto x : children)
      left[i] += left[x];
    for (auto x : children) {
      if (p.costs.share(left[i]) <= bound)
        break;
      result[x] = true;
      left[i] -= left[x];
    }
  }
  result[0] = true;
  return result;
}

/// @returns the node that the part of each node begins with.
std::vector<size_t> parts_of(const partition_problem& p, size_t parts) {
  constexpr int halvings = 20;
  auto best = cuts_of(p, 1);
  double low = 0;
  double high = 1;
  for (int i = 0; i < halvings; ++i) {
    auto bound = (low + high) / 2;
    auto cut = cuts_of(p, bound);
    auto few = static_cast<size_t>(std::count(cut.begin(), cut.end(), true))
               <= parts;
    (few ? high : low) = bound;
    if (few)
      best = std::move(cut);
  }
  auto n = p.tree.size();
  std::vector<size_t> result(n);
  for (size_t i = 1; i < n; ++i)
    result[i] = best[i] ? i : result[p.tree[i].parent];
  return result;
}

} // namespace

assignment cut_tree(const partition_problem& p, size_t parts) {
  auto part = parts_of(p, parts);
  auto n = part.size();
  std::vector<exact_cost> costs(n);
  std::vector<exact_cost> loads(p.devices);
  for (size_t i = 0; i < n; ++i)
    if (p.fixed[i])
      loads[*p.fixed[i]] += p.costs.own(i);
    else if (part[i] == 0)
      loads[0] += p.costs.own(i);
    else
      costs[part[i]] += p.costs.own(i);
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&costs](size_t x, size_t y) {
    return costs[x] > costs[y];
  });
  assignment device(n);
  for (auto x : order)
    if (costs[x] > 0) {
      auto emptiest = std::min_element(loads.begin(), loads.end());
      *emptiest += costs[x];
      device[x] = static_cast<uint32_t>(emptiest - loads.begin());
    }
  assignment result(n);
  for (size_t i = 0; i < n; ++i)
    result[i] = p.fixed[i].value_or(device[part[i]]);
  return result;
}

} // namespace smp
