#include "partition/search/balanced.hpp"

#include "partition/search/chain.hpp"
#include "partition/search/search.hpp"
#include "partition/search/tree_cut.hpp"

#include <algorithm>
#include <tuple>

namespace smp {

namespace {

// Bounds of the search, in nodes and calls looked at.
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
    // Ties go to the first start, so put the natural order first.
    std::vector<assignment> starts;
    for (double grain : {1.0, 1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 0.0})
      starts.push_back(chain(grain / p_.devices));
    starts.push_back(largest_first());
    for (size_t grain : {1, 2, 4})
      starts.push_back(cut_tree(p_, grain * p_.devices));
    starts.push_back(paper_);
    auto limit = score(p_, paper_, crossing_).predicted;
    auto result = search(starts, {crossing_});
    if (crossing_.request == 0 && crossing_.byte == 0) {
      auto best = score(p_, result, crossing_).predicted;
      starts.push_back(result);
      // A request costs more than any difference in load within the limit.
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

  /// One piece of the execution order per device.
  assignment chain(double grain) const {
    auto result = split_chain(p_, grain, p_.devices);
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = p_.fixed[i].value_or(result[i]);
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
