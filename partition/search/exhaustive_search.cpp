#include "partition/search/search.hpp"

#include <algorithm>

namespace smp {

namespace {

class exhaustive_search {
public:
  exhaustive_search(const partition_problem& p, const search_goal& goal,
                    assignment start, size_t effort)
    : p_(p),
      goal_(goal),
      best_(std::move(start)),
      x_(best_),
      effort_(effort),
      loads_(p.devices),
      known_at_(p.tree.size()) {
    best_value_ = value(score(p, best_, goal.crossing));
    arrange();
  }

  assignment run() {
    descend(0, 0, 1);
    return std::move(best_);
  }

private:
  double own(size_t i) const {
    return p_.costs.share(p_.costs.own(i));
  }

  double value(const partition_score& x) const {
    return x.max_load > goal_.max_load + load_noise ? infinite : x.predicted;
  }

  /// Fixed nodes first, then the most expensive ones. The cost of a call is
  /// known as soon as all nodes that it depends on are placed.
  void arrange() {
    for (size_t i = 0; i < p_.tree.size(); ++i)
      order_.push_back(i);
    std::stable_sort(order_.begin(), order_.end(), [this](size_t x, size_t y) {
      if (p_.fixed[x].has_value() != p_.fixed[y].has_value())
        return p_.fixed[x].has_value();
      return p_.costs.own(x) > p_.costs.own(y);
    });
    std::vector<size_t> positions(order_.size());
    for (size_t i = 0; i < order_.size(); ++i)
      positions[order_[i]] = i;
    for (auto& call : p_.calls) {
      auto last = std::max(positions[call.caller], positions[call.callee]);
      for (auto other : {call.previous, call.next})
        if (other != module_call::none)
          last = std::max(last, positions[p_.calls[other].callee]);
      known_at_[last].push_back(&call);
    }
    rest_.resize(order_.size() + 1);
    for (auto i = order_.size(); i-- > 0;)
      rest_[i] = rest_[i + 1] + own(order_[i]);
  }

  /// @param used devices 0 to used - 1 differ; the others are interchangeable.
  void descend(size_t depth, double crossing, uint32_t used) {
    if (depth == order_.size()) {
      auto x = value(score(p_, x_, goal_.crossing));
      if (x < best_value_ - load_noise) {
        best_value_ = x;
        best_ = x_;
      }
      return;
    }
    auto node = order_[depth];
    if (p_.fixed[node])
      return place(depth, crossing, *p_.fixed[node],
                   std::max(used, *p_.fixed[node] + 1));
    for (uint32_t device = 0; device < std::min(used + 1, p_.devices); ++device)
      place(depth, crossing, device, std::max(used, device + 1));
  }

  void place(size_t depth, double crossing, uint32_t device, uint32_t used) {
    if (effort_ == 0)
      return;
    --effort_;
    auto node = order_[depth];
    x_[node] = device;
    loads_[device] += own(node);
    for (auto call : known_at_[depth])
      crossing += price(goal_.crossing, cost_of(p_, *call, x_));
    double largest = 0;
    double sum = rest_[depth + 1];
    for (auto load : loads_) {
      largest = std::max(largest, load);
      sum += load;
    }
    auto bound = std::max(largest, sum / p_.devices);
    if (bound <= goal_.max_load + load_noise
        && bound + crossing < best_value_ - load_noise)
      descend(depth + 1, crossing, used);
    loads_[device] -= own(node);
  }

  const partition_problem& p_;
  search_goal goal_;
  assignment best_;
  double best_value_ = 0;
  assignment x_;
  size_t effort_;
  std::vector<double> loads_;
  std::vector<size_t> order_;
  std::vector<std::vector<const module_call*>> known_at_;
  std::vector<double> rest_; // own costs of what is not placed yet
};

} // namespace

assignment exhaust(const partition_problem& p, const search_goal& goal,
                   assignment start, size_t effort) {
  return exhaustive_search{p, goal, std::move(start), effort}.run();
}

} // namespace smp
