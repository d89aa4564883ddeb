#include "partition/search/problem.hpp"

#include <algorithm>

namespace smp {

namespace {

/// Lists the calls between modules. The children of a list are called by the
/// code of its nearest ancestor that is not a list.
class call_finder {
public:
  call_finder(const model_info& model, const module_tree& tree)
    : model_(model), tree_(tree) {
    for (size_t i = 0; i < model.size(); ++i)
      if (!is_list(i))
        add_callees(i);
  }

  std::vector<module_call> result;

private:
  bool is_list(size_t i) const {
    return i > 0 && model_[i].container && !model_[i].sequential;
  }

  void add_callees(size_t caller) {
    auto sequential = model_[caller].sequential;
    auto last = module_call::none;
    std::vector<size_t> stack{caller};
    std::vector<size_t> lists;
    while (!stack.empty()) {
      auto here = stack.back();
      stack.pop_back();
      if (here != caller && !is_list(here)) {
        last = add(caller, here, sequential ? last : module_call::none);
        continue;
      }
      // Lists that contain each other end here.
      if (std::find(lists.begin(), lists.end(), here) != lists.end())
        continue;
      lists.push_back(here);
      auto& xs = model_[here].children;
      for (auto x = xs.rbegin(); x != xs.rend(); ++x)
        stack.push_back(x->value);
    }
  }

  size_t add(size_t caller, size_t callee, size_t previous) {
    auto index = result.size();
    if (previous != module_call::none)
      result[previous].next = index;
    result.push_back(
      {tree_.node_of(module_id{caller}), tree_.node_of(module_id{callee}),
       model_[callee].call_bytes, model_[callee].calls, previous});
    return index;
  }

  const model_info& model_;
  const module_tree& tree_;
};

} // namespace

partition_problem::partition_problem(const model_info& model,
                                     const module_tree& tree,
                                     const cost_table& costs, uint32_t devices,
                                     std::vector<std::optional<uint32_t>> fixed)
  : tree(tree),
    costs(costs),
    devices(devices),
    fixed(std::move(fixed)),
    calls(call_finder{model, tree}.result) {
  // nop
}

call_cost cost_of(const partition_problem& p, const module_call& call,
                  const assignment& x) {
  auto here = x[call.callee];
  if (x[call.caller] == here)
    return {};
  auto runs_on = [&](size_t other) {
    return other != module_call::none && x[p.calls[other].callee] == here;
  };
  // A run carries the inputs of its first and the outputs of its last call.
  auto first = !runs_on(call.previous);
  auto last = !runs_on(call.next);
  return {call.times * first, call.times * call.bytes * (first + last)};
}

std::vector<exact_cost> loads(const partition_problem& p, const assignment& x) {
  std::vector<exact_cost> result(p.devices);
  for (size_t i = 0; i < x.size(); ++i)
    result[x[i]] += p.costs.own(i);
  return result;
}

partition_score score(const partition_problem& p, const assignment& x,
                      const communication& c) {
  partition_score result;
  auto xs = loads(p, x);
  result.max_load = p.costs.share(*std::max_element(xs.begin(), xs.end()));
  call_cost sum;
  for (auto& call : p.calls) {
    auto y = cost_of(p, call, x);
    sum.requests += y.requests;
    sum.half_bytes += y.half_bytes;
  }
  result.requests = sum.requests;
  result.bytes = sum.half_bytes / 2;
  result.predicted = result.max_load + price(c, sum);
  return result;
}

} // namespace smp
