#include "partition/search/search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

namespace smp {

namespace {

/// The calls whose cost may change when a node moves.
class call_index {
public:
  explicit call_index(const partition_problem& p) : begins_(p.tree.size() + 1) {
    auto visit = [&p](auto f) {
      for (size_t i = 0; i < p.calls.size(); ++i) {
        auto& x = p.calls[i];
        f(x.caller, i);
        f(x.callee, i);
        if (x.previous != module_call::none)
          f(p.calls[x.previous].callee, i);
        if (x.next != module_call::none)
          f(p.calls[x.next].callee, i);
      }
    };
    visit([this](size_t node, size_t) { ++begins_[node + 1]; });
    for (size_t i = 1; i < begins_.size(); ++i)
      begins_[i] += begins_[i - 1];
    calls_.resize(begins_.back());
    auto at = begins_;
    visit([&](size_t node, size_t call) { calls_[at[node]++] = call; });
  }

  std::span<const size_t> of(size_t node) const {
    return std::span{calls_}.subspan(begins_[node],
                                     begins_[node + 1] - begins_[node]);
  }

private:
  std::vector<size_t> begins_;
  std::vector<size_t> calls_;
};

class local_search {
public:
  local_search(const partition_problem& p, const search_goal& goal,
               assignment start, size_t effort)
    : p_(p),
      goal_(goal),
      index_(p),
      x_(std::move(start)),
      effort_(effort),
      loads_(p.devices),
      seen_(p.calls.size()) {
    for (size_t i = 0; i < x_.size(); ++i)
      loads_[x_[i]] += own(i);
    rank_loads();
  }

  assignment run() {
    bool improved = true;
    while (improved && effort_ > 0) {
      improved = false;
      for (size_t i = 1; i < x_.size() && effort_ > 0; ++i)
        if (!p_.fixed[i])
          improved |= relocate(i);
      if (x_.size() <= 64)
        improved |= swap_all();
    }
    return std::move(x_);
  }

private:
  struct gain {
    double value = 0;  // of predicted time; negative is better
    double spread = 0; // of the sum of squared loads, breaks ties

    bool better_than(const gain& y) const {
      if (std::abs(value - y.value) > load_noise)
        return value < y.value;
      return spread < y.spread - load_noise;
    }
  };

  double own(size_t i) const {
    return p_.costs.share(p_.costs.own(i));
  }

  // -- loads ------------------------------------------------------------------

  /// Remembers the three most loaded devices, as a move changes two.
  void rank_loads() {
    std::fill(top_.begin(), top_.end(), none);
    for (uint32_t device = 0; device < p_.devices; ++device) {
      auto x = device;
      for (auto& y : top_)
        if (y == none || (x != none && loads_[x] > loads_[y]))
          std::swap(x, y);
    }
  }

  /// @returns the largest load if two devices had these loads.
  double max_load(uint32_t a, double load_a, uint32_t b, double load_b) const {
    auto result = std::max(load_a, load_b);
    for (auto x : top_)
      if (x != none && x != a && x != b)
        return std::max(result, loads_[x]);
    return result;
  }

  /// The loads after `from` gives `amount` to `to`.
  gain load_gain(uint32_t from, uint32_t to, double amount) const {
    auto before = loads_[top_[0]];
    auto after = max_load(from, loads_[from] - amount, to, loads_[to] + amount);
    if (after > goal_.max_load + load_noise && after > before + load_noise)
      return {infinite, infinite};
    return {after - before, 2 * amount * (amount + loads_[to] - loads_[from])};
  }

  // -- crossing calls ---------------------------------------------------------

  void collect_calls(const std::vector<size_t>& nodes) {
    ++stamp_;
    calls_.clear();
    for (auto node : nodes)
      for (auto call : index_.of(node))
        if (std::exchange(seen_[call], stamp_) != stamp_)
          calls_.push_back(call);
    effort_ -= std::min(effort_, nodes.size() + calls_.size());
  }

  double crossing() const {
    double result = 0;
    for (auto call : calls_)
      result += price(goal_.crossing, cost_of(p_, p_.calls[call], x_));
    return result;
  }

  // -- moves ------------------------------------------------------------------

  void put(const std::vector<size_t>& nodes, uint32_t device) {
    for (auto node : nodes)
      x_[node] = device;
  }

  /// Moves node `i`, or the connected part below it on its device, to where it
  /// improves the goal most.
  bool relocate(size_t i) {
    auto result = relocate(std::vector<size_t>{i});
    auto part = part_below(i);
    if (part.size() > 1)
      result |= relocate(part);
    return result;
  }

  bool relocate(const std::vector<size_t>& nodes) {
    auto from = x_[nodes[0]];
    double amount = 0;
    for (auto node : nodes)
      amount += own(node);
    collect_calls(nodes);
    auto before = crossing();
    gain best;
    auto target = from;
    for (uint32_t to = 0; to < p_.devices; ++to) {
      if (to == from)
        continue;
      auto x = load_gain(from, to, amount);
      if (x.value == infinite)
        continue;
      put(nodes, to);
      effort_ -= std::min(effort_, calls_.size());
      x.value += crossing() - before;
      if (x.better_than(best)) {
        best = x;
        target = to;
      }
    }
    put(nodes, target);
    if (target == from)
      return false;
    loads_[from] -= amount;
    loads_[target] += amount;
    rank_loads();
    return true;
  }

  /// @returns `i` and the nodes connected below it on the same device.
  std::vector<size_t> part_below(size_t i) const {
    std::vector<size_t> result{i};
    auto device = x_[i];
    for (auto k = i + 1; k < p_.tree[i].subtree_end;) {
      if (x_[k] == device && !p_.fixed[k])
        result.push_back(k++);
      else
        k = p_.tree[k].subtree_end;
    }
    return result;
  }

  bool swap_all() {
    bool result = false;
    for (size_t i = 1; i < x_.size(); ++i)
      for (size_t k = i + 1; k < x_.size() && effort_ > 0; ++k)
        if (x_[i] != x_[k] && !p_.fixed[i] && !p_.fixed[k])
          result |= swap(i, k);
    return result;
  }

  bool swap(size_t i, size_t k) {
    auto a = x_[i];
    auto b = x_[k];
    auto amount = own(i) - own(k);
    auto x = load_gain(a, b, amount);
    if (x.value == infinite)
      return false;
    collect_calls({i, k});
    auto before = crossing();
    std::swap(x_[i], x_[k]);
    x.value += crossing() - before;
    if (!x.better_than({})) {
      std::swap(x_[i], x_[k]);
      return false;
    }
    loads_[a] -= amount;
    loads_[b] += amount;
    rank_loads();
    return true;
  }

  static constexpr uint32_t none = ~uint32_t{0};

  const partition_problem& p_;
  search_goal goal_;
  call_index index_;
  assignment x_;
  size_t effort_;
  std::vector<double> loads_;
  std::array<uint32_t, 3> top_{};
  std::vector<size_t> calls_; // affected by the move at hand
  std::vector<size_t> seen_;  // last stamp of each call
  size_t stamp_ = 0;
};

} // namespace

assignment improve(const partition_problem& p, const search_goal& goal,
                   assignment start, size_t effort) {
  return local_search{p, goal, std::move(start), effort}.run();
}

} // namespace smp
