#include "partition/balanced.hpp"

#include "partition/search.hpp"
#include "partition/segment.hpp"

#include <algorithm>
#include <tuple>

namespace smp {

namespace {

// Bounds of the work, in looked-at nodes and calls.
constexpr size_t local_effort = 6'000'000;
constexpr size_t exhaustive_effort = 400'000;
constexpr size_t exhaustive_nodes = 16;

class balanced_strategy {
public:
  balanced_strategy(const partition_problem& p, const communication& crossing,
                    const assignment& paper)
    : p_(p), crossing_(crossing), paper_(paper) {
    // nop
  }

  assignment run() {
    // Of equally good ones the first wins, so put the natural order first.
    std::vector<assignment> starts;
    for (double grain : {1.0, 1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 0.0})
      starts.push_back(chain(grain / p_.devices));
    starts.push_back(largest_first());
    starts.push_back(paper_);
    auto limit = score(p_, paper_, crossing_).predicted;
    auto result = search(starts, {crossing_});
    if (crossing_.request == 0 && crossing_.byte == 0) {
      auto best = score(p_, result, crossing_).predicted;
      starts.push_back(result);
      // A request is worth more than any load within the limit.
      auto most = best * (1 + crossing_.tolerance);
      result = search(starts, {{1, 0}, std::min(limit, most)});
    }
    return score(p_, result, crossing_).predicted <= limit ? result : paper_;
  }

private:
  assignment search(const std::vector<assignment>& starts,
                    const search_goal& goal) {
    std::vector<assignment> found;
    auto effort = local_effort / starts.size();
    for (auto& start : starts)
      found.push_back(improve(p_, goal, start, effort));
    auto best = *std::min_element(
      found.begin(), found.end(),
      [&](auto& x, auto& y) { return less(goal, x, y); });
    if (p_.tree.size() <= exhaustive_nodes)
      return exhaust(p_, goal, best, exhaustive_effort);
    return best;
  }

  bool less(const search_goal& goal, const assignment& x,
            const assignment& y) const {
    auto key = [&](const assignment& z) {
      auto s = score(p_, z, goal.crossing);
      return std::tuple{s.max_load > goal.max_load, s.predicted, s.requests};
    };
    return key(x) < key(y);
  }

  assignment fixed_only() const {
    assignment result(p_.tree.size());
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = p_.fixed[i].value_or(0);
    return result;
  }

  /// Splits the nodes in preorder, which is the order of execution, into one
  /// piece per device; subtrees of at most `grain` stay whole.
  assignment chain(double grain) const {
    std::vector<size_t> begins; // of pieces that stay whole
    std::vector<exact_cost> prefix{0};
    for (size_t i = 0; i < p_.tree.size();) {
      auto end = i + 1;
      if (i > 0 && p_.costs.share(p_.costs.subtree(i)) <= grain)
        end = p_.tree[i].subtree_end;
      begins.push_back(i);
      prefix.push_back(prefix.back());
      for (; i < end; ++i)
        if (!p_.fixed[i])
          prefix.back() += p_.costs.own(i);
    }
    auto parts = std::min<size_t>(p_.devices, begins.size());
    auto ends = min_max_split(prefix, parts);
    auto result = fixed_only();
    begins.push_back(p_.tree.size());
    size_t first = 0;
    for (uint32_t device = 0; device < parts; ++device) {
      for (auto i = begins[first]; i < begins[ends[device]]; ++i)
        if (!p_.fixed[i])
          result[i] = device;
      first = ends[device];
    }
    return result;
  }

  /// Each node to the emptiest device, the largest node first.
  assignment largest_first() const {
    auto result = fixed_only();
    std::vector<exact_cost> loads(p_.devices);
    std::vector<size_t> order;
    for (size_t i = 0; i < result.size(); ++i)
      if (p_.fixed[i])
        loads[result[i]] += p_.costs.own(i);
      else
        order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [this](size_t x, size_t y) {
      return p_.costs.own(x) > p_.costs.own(y);
    });
    for (auto i : order) {
      auto x = std::min_element(loads.begin(), loads.end());
      *x += p_.costs.own(i);
      result[i] = static_cast<uint32_t>(x - loads.begin());
    }
    return result;
  }

  const partition_problem& p_;
  communication crossing_;
  const assignment& paper_;
};

} // namespace

assignment balanced_partition(const partition_problem& p,
                              const communication& crossing,
                              const assignment& paper) {
  return balanced_strategy{p, crossing, paper}.run();
}

} // namespace smp
