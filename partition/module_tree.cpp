#include "partition/module_tree.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

namespace smp {

namespace {

// Trees can be 20,000 modules deep, so nothing here recurses.

constexpr size_t unset = ~size_t{0};

std::string name_of(const model_info& model, size_t i) {
  if (i == 0)
    return "the root";
  auto& path = model[i].path;
  return "module " + (path.empty() ? std::to_string(i) : path);
}

void check(const model_info& model) {
  if (model.empty())
    throw error{error_code::config, "there is no module to partition"};
  for (size_t i = 0; i < model.size(); ++i)
    for (auto child : model[i].children)
      if (child.value >= model.size())
        throw error{error_code::config,
                    name_of(model, i) + " has child "
                      + std::to_string(child.value) + ", but there are only "
                      + std::to_string(model.size()) + " modules"};
}

/// @returns the position of each module in preorder, at its first visit.
std::vector<size_t> preorder_positions(const model_info& model) {
  std::vector<size_t> result(model.size(), unset);
  std::vector<size_t> stack{0};
  size_t next = 0;
  while (!stack.empty()) {
    auto i = stack.back();
    stack.pop_back();
    if (result[i] != unset)
      continue;
    result[i] = next++;
    auto& xs = model[i].children;
    for (auto child = xs.rbegin(); child != xs.rend(); ++child)
      stack.push_back(child->value);
  }
  for (size_t i = 0; i < model.size(); ++i)
    if (result[i] == unset)
      throw error{error_code::config,
                  name_of(model, i) + " is not reached from the root"};
  return result;
}

/// Connected components.
class components {
public:
  explicit components(size_t n) : up_(n) {
    std::iota(up_.begin(), up_.end(), size_t{0});
  }

  size_t find(size_t x) {
    while (up_[x] != x)
      x = up_[x] = up_[up_[x]];
    return x;
  }

  void merge(size_t x, size_t y) {
    up_[find(x)] = find(y);
  }

private:
  std::vector<size_t> up_;
};

/// Finds the modules that must stay together, in preorder.
class merger {
public:
  merger(const model_info& model, const std::vector<size_t>& order)
    : sets(model.size()), model_(model) {
    for (auto i : order) {
      join_owners(i, model[i].parameters, parameter_owners_,
                  merge_reason::kind::shared_parameter);
      join_owners(i, model[i].buffers, buffer_owners_,
                  merge_reason::kind::shared_buffer);
      join_children(i);
      join_callers(i);
    }
  }

  components sets;
  std::vector<merge_reason> reasons;

private:
  using owners = std::unordered_map<uint64_t, size_t>;

  void join_owners(size_t i, const std::vector<tensor_info>& xs, owners& seen,
                   merge_reason::kind what) {
    std::unordered_set<size_t> explained;
    for (auto& x : xs) {
      auto first = seen.emplace(x.id, i).first->second;
      if (first == i)
        continue;
      sets.merge(i, first);
      if (explained.insert(first).second)
        reasons.push_back({what, module_id{i}, module_id{first}, x.name});
    }
  }

  void join_children(size_t i) {
    for (auto child : model_[i].children) {
      auto& x = model_[child.value];
      auto& why = x.not_interceptable;
      if ((why.empty() && x.part_of.empty()) || child.value == i)
        continue;
      sets.merge(child.value, i);
      if (x.part_of.empty()) // else it is not a surprise
        reasons.push_back(
          {merge_reason::kind::not_interceptable, child, module_id{i}, why});
    }
  }

  void join_callers(size_t i) {
    for (auto& [caller, why] : model_[i].stays_with) {
      sets.merge(i, caller.value);
      reasons.push_back(
        {merge_reason::kind::unsendable, module_id{i}, caller, why});
    }
  }

  const model_info& model_;
  owners parameter_owners_;
  owners buffer_owners_;
};

uint64_t distinct_elements(const model_info& model,
                           const std::vector<module_id>& modules) {
  std::unordered_set<uint64_t> seen;
  uint64_t result = 0;
  for (auto x : modules)
    for (auto& parameter : model[x.value].parameters)
      if (seen.insert(parameter.id).second)
        result += parameter.elements;
  return result;
}

/// Modules that must stay together form one unit; units form a tree, too.
struct component_tree {
  /// Units are in the order of their first modules in preorder, and are
  /// numbered in that order.
  component_tree(const model_info& model, const std::vector<size_t>& order,
                 components& sets)
    : of(model.size()) {
    std::vector<size_t> numbers(model.size(), unset);
    for (auto i : order) {
      auto& number = numbers[sets.find(i)];
      if (number == unset) {
        number = modules.size();
        modules.emplace_back();
      }
      of[i] = number;
      modules[number].push_back(module_id{i});
    }
    connect(model);
  }

  std::vector<size_t> of; // by module
  std::vector<std::vector<module_id>> modules;
  std::vector<size_t> parents;
  std::vector<std::vector<size_t>> children;

private:
  /// Breadth first, the first parent wins.
  void connect(const model_info& model) {
    parents.assign(modules.size(), unset);
    children.resize(modules.size());
    std::vector<size_t> queue{0};
    parents[0] = 0;
    for (size_t head = 0; head < queue.size(); ++head) {
      auto here = queue[head];
      auto& xs = children[here];
      for (auto x : modules[here])
        for (auto child : model[x.value].children) {
          auto y = of[child.value];
          if (parents[y] == unset) {
            parents[y] = here;
            xs.push_back(y);
          }
        }
      std::sort(xs.begin(), xs.end());
      queue.insert(queue.end(), xs.begin(), xs.end());
    }
  }
};

} // namespace

module_tree::module_tree(const model_info& model) : node_of_(model.size()) {
  check(model);
  auto positions = preorder_positions(model);
  std::vector<size_t> order(model.size());
  for (size_t i = 0; i < model.size(); ++i)
    order[positions[i]] = i;
  merger merged{model, order};
  merges_ = std::move(merged.reasons);
  component_tree parts{model, order, merged.sets};
  // Number the nodes in preorder, so that each subtree is a range.
  std::vector<size_t> node_of_component(parts.modules.size());
  std::vector<size_t> stack{0};
  while (!stack.empty()) {
    auto here = stack.back();
    stack.pop_back();
    auto index = nodes_.size();
    node_of_component[here] = index;
    auto& node = nodes_.emplace_back();
    node.parameters = distinct_elements(model, parts.modules[here]);
    for (auto x : parts.modules[here])
      node_of_[x.value] = index;
    node.modules = std::move(parts.modules[here]);
    node.parent = node_of_component[parts.parents[here]];
    if (index > 0)
      nodes_[node.parent].children.push_back(index);
    auto& below = parts.children[here];
    stack.insert(stack.end(), below.rbegin(), below.rend());
  }
  for (size_t i = nodes_.size(); i-- > 0;) {
    auto& x = nodes_[i];
    x.subtree_end = x.children.empty() ? i + 1
                                       : nodes_[x.children.back()].subtree_end;
  }
}

} // namespace smp
