#pragma once

// The paper's partitioning written down a second time: recursive, with the
// printed recursion over all split points. Slow on purpose; shares no code with
// partition/ except for the tree.

#include "partition/module_tree.hpp"

#include <algorithm>

namespace smp::test {

/// @tparam Tree a `module_tree`, or what looks like one.
template <class Tree = module_tree>
class naive_partition {
public:
  /// @param own integer cost of each node.
  naive_partition(const Tree& tree, std::vector<int64_t> own,
                  uint32_t num_devices)
    : device(tree.size()), tree_(tree), own_(std::move(own)) {
    std::vector<uint32_t> all;
    for (uint32_t i = 0; i < num_devices; ++i)
      all.push_back(i);
    visit(0, all);
  }

  std::vector<uint32_t> device;

private:
  using devices = std::vector<uint32_t>;
  using nodes = std::vector<size_t>;

  int64_t cost(size_t node) const {
    auto result = own_[node];
    for (auto child : tree_[node].children)
      result += cost(child);
    return result;
  }

  int64_t cost(const nodes& xs) const {
    int64_t result = 0;
    for (auto x : xs)
      result += cost(x);
    return result;
  }

  void visit(size_t node, const devices& xs) {
    device[node] = xs[0];
    if (xs.size() > 1)
      return partition(xs, tree_[node].children);
    for (auto child : tree_[node].children)
      visit(child, xs);
  }

  void partition(const devices& xs, const nodes& children) {
    if (children.empty())
      return;
    auto segments = split(children, std::min(xs.size(), children.size()));
    std::vector<devices> allotted(segments.size());
    for (auto x = xs.rbegin(); x != xs.rend(); ++x) {
      size_t best = 0;
      for (size_t i = 1; i < segments.size(); ++i) {
        auto seats = [&](size_t k) {
          return static_cast<int64_t>(allotted[k].size()) + 1;
        };
        if (cost(segments[i]) * seats(best) > cost(segments[best]) * seats(i))
          best = i;
      }
      allotted[best].insert(allotted[best].begin(), *x);
    }
    for (size_t i = 0; i < segments.size(); ++i) {
      if (allotted[i].empty())
        allotted[i] = {xs[0]};
      if (segments[i].size() == 1 || allotted[i].size() == 1)
        for (auto node : segments[i])
          visit(node, allotted[i]);
      else
        partition(allotted[i], segments[i]);
    }
  }

  std::vector<nodes> split(const nodes& xs, size_t parts) const {
    struct entry {
      int64_t value;
      size_t split;
    };
    auto n = xs.size();
    std::vector<std::vector<entry>> c(parts + 1, std::vector<entry>(n + 1));
    for (size_t i = 1; i <= n; ++i)
      c[1][i] = {cost({xs.begin(), xs.begin() + i}), 0};
    for (size_t k = 2; k <= parts; ++k)
      for (size_t i = k; i <= n; ++i)
        for (size_t j = k - 1; j < i; ++j) {
          auto value = std::max(c[k - 1][j].value,
                                cost({xs.begin() + j, xs.begin() + i}));
          if (j == k - 1 || value < c[k][i].value)
            c[k][i] = {value, j};
        }
    std::vector<nodes> result(parts);
    for (auto k = parts; k > 0; --k) {
      auto begin = c[k][n].split;
      result[k - 1] = {xs.begin() + begin, xs.begin() + n};
      n = begin;
    }
    return result;
  }

  const Tree& tree_;
  std::vector<int64_t> own_;
};

} // namespace smp::test
