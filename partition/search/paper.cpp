#include "partition/search/paper.hpp"

#include "partition/search/segment.hpp"

#include <numeric>

namespace smp {

namespace {

using device_set = std::vector<uint32_t>; // ascending

class paper_strategy {
public:
  explicit paper_strategy(const partition_problem& p)
    : p_(p), costs_(p.tree.size()), sets_(p.tree.size()) {
    result_.devices.resize(p.tree.size());
    for (size_t i = p.tree.size(); i-- > 0;)
      if (is_free(i)) {
        costs_[i] += p.costs.own(i);
        if (i > 0)
          costs_[p.tree[i].parent] += costs_[i];
      }
  }

  /// Algorithm 1. Nodes stand in preorder, not breadth first; as a node's
  /// decision depends on its parent's only, the result is the same.
  paper_decision run() {
    sets_[0].resize(p_.devices);
    std::iota(sets_[0].begin(), sets_[0].end(), 0u);
    for (size_t i = 0; i < p_.tree.size(); ++i) {
      if (!is_free(i)) {
        result_.devices[i] = *p_.fixed[i];
        continue;
      }
      auto devices = std::move(sets_[i]);
      result_.devices[i] = devices.front();
      visit(i, devices);
    }
    return std::move(result_);
  }

private:
  bool is_free(size_t i) const {
    return i == 0 || !p_.fixed[i];
  }

  void visit(size_t i, const device_set& devices) {
    std::vector<size_t> children;
    for (auto child : p_.tree[i].children)
      if (is_free(child))
        children.push_back(child);
    if (devices.size() > 1 && !children.empty()) {
      share(devices, children);
    } else {
      for (auto child : children)
        sets_[child] = {devices.front()};
      if (devices.size() > 1 && p_.tree[i].children.empty())
        result_.idle.push_back({i, {devices.begin() + 1, devices.end()}});
    }
  }

  /// Algorithm 2, with a stack instead of recursion, which decreasing costs
  /// would make as deep as there are children.
  void share(const device_set& devices, const std::vector<size_t>& children) {
    std::vector<exact_cost> prefix{0};
    for (auto child : children)
      prefix.push_back(prefix.back() + costs_[child]);
    struct range {
      device_set devices;
      size_t begin;
      size_t end;
    };
    std::vector<range> stack{{devices, 0, children.size()}};
    while (!stack.empty()) {
      auto here = std::move(stack.back());
      stack.pop_back();
      auto parts = std::min(here.devices.size(), here.end - here.begin);
      auto sums = std::span{prefix}.subspan(here.begin,
                                            here.end - here.begin + 1);
      auto ends = min_max_split(sums, parts);
      std::vector<exact_cost> costs;
      size_t begin = 0;
      for (auto end : ends) {
        costs.push_back(sums[end] - sums[begin]);
        begin = end;
      }
      auto sets = allot(here.devices, costs);
      begin = here.begin;
      for (size_t k = 0; k < parts; ++k) {
        auto end = here.begin + ends[k];
        if (sets[k].size() > 1 && end - begin > 1) {
          stack.push_back({std::move(sets[k]), begin, end});
        } else {
          if (sets[k].empty())
            sets[k] = {here.devices.front()};
          for (auto i = begin; i < end; ++i)
            sets_[children[i]] = sets[k];
        }
        begin = end;
      }
    }
  }

  const partition_problem& p_;
  std::vector<exact_cost> costs_; // of subtrees without pinned nodes
  std::vector<device_set> sets_;
  paper_decision result_;
};

} // namespace

paper_decision paper_partition(const partition_problem& p) {
  return paper_strategy{p}.run();
}

} // namespace smp
