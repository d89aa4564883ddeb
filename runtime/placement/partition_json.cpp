#include "runtime/placement/partition_json.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/placement/module_times.hpp"
#include "transport/error.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace smp {

namespace {

using json = nlohmann::json;
using ordered_json = nlohmann::ordered_json;

constexpr size_t no_parent = ~size_t{0};
constexpr size_t shown_name = 60; // bytes in an error message

/// Text that is fit for JSON and for a terminal.
std::string quoted(std::string x) {
  if (x.size() > shown_name) {
    x.resize(shown_name);
    x += "...";
  }
  return json_text(json(x));
}

// -- reading ------------------------------------------------------------------

class tree_reader {
public:
  explicit tree_reader(const std::string& name) : name_(name) {
    // nop
  }

  partition_tree run(const std::string& text) {
    auto root = parse(text);
    if (!root.is_object())
      fail("an object with the list \"nodes\" expected, found "
           + std::string{root.type_name()});
    auto nodes = root.find("nodes");
    if (nodes == root.end())
      fail("field \"nodes\" is missing");
    if (!nodes->is_array() || nodes->empty())
      fail("field \"nodes\" must be a list of at least one node");
    nodes_ = &*nodes;
    partition_tree result;
    for (size_t i = 0; i < nodes_->size(); ++i)
      result.model.push_back(read_node(i));
    check_tree(result.model);
    result.model[0].path.clear();
    read_step_seconds(root, result);
    return result;
  }

private:
  // -- errors -----------------------------------------------------------------

  [[noreturn]] void fail(const std::string& why) const {
    throw error{error_code::config, name_ + ": " + why};
  }

  std::string describe(size_t i) const {
    auto result = "node " + std::to_string(i);
    auto& x = (*nodes_)[i];
    if (auto name = x.find("name");
        x.is_object() && name != x.end() && name->is_string())
      result += " (" + quoted(name->get<std::string>()) + ")";
    return result;
  }

  [[noreturn]] void fail(size_t i, const char* field,
                         const std::string& why) const {
    fail(describe(i) + ": field \"" + field + "\" " + why);
  }

  /// @returns "is -1", "is a string".
  static std::string found(const json& x) {
    if (x.is_number())
      return "is " + x.dump();
    return "is "
           + std::string{x.is_null()                     ? "null"
                         : x.is_array() || x.is_object() ? "an "
                                                         : "a "}
           + (x.is_null() ? "" : x.type_name());
  }

  // -- fields -----------------------------------------------------------------

  json parse(const std::string& text) const {
    try {
      return json::parse(text);
    } catch (const json::exception& x) {
      std::string why = x.what();
      // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
      auto end = why.find("] ");
      fail("not valid JSON: "
           + (end == std::string::npos ? why : why.substr(end + 2)));
    }
  }

  const json& field(size_t i, const char* name) const {
    auto& x = (*nodes_)[i];
    auto result = x.find(name);
    if (result == x.end())
      fail(i, name, "is missing");
    return *result;
  }

  double cost(size_t i, const char* name) const {
    auto& x = field(i, name);
    if (!x.is_number())
      fail(i, name, found(x) + ", must be a number");
    if (x.get<double>() < 0)
      fail(i, name, found(x) + ", must be 0 or more");
    return x.get<double>();
  }

  const json& list(size_t i, const char* name) const {
    auto& x = field(i, name);
    if (!x.is_array())
      fail(i, name, found(x) + ", must be a list");
    return x;
  }

  module_info read_node(size_t i) {
    if (!(*nodes_)[i].is_object())
      fail(describe(i) + " " + found((*nodes_)[i]) + ", must be an object");
    module_info result;
    auto& name = field(i, "name");
    if (!name.is_string())
      fail(i, "name", found(name) + ", must be a string");
    result.path = name;
    result.activations = cost(i, "memory");
    result.compute = cost(i, "compute");
    for (auto& x : list(i, "children")) {
      if (!x.is_number_integer())
        fail(i, "children",
             "has an entry that " + found(x)
               + ", must be the number of a node");
      if (!x.is_number_unsigned() || x.get<uint64_t>() >= nodes_->size())
        fail(i, "children",
             "names node " + x.dump() + ", but there are only "
               + std::to_string(nodes_->size()));
      result.children.push_back(module_id{x.get<uint64_t>()});
    }
    if ((*nodes_)[i].contains("params"))
      for (auto& x : list(i, "params")) {
        if (!x.is_string())
          fail(i, "params",
               "has an entry that " + found(x) + ", must be a string");
        auto text = x.get<std::string>();
        auto id = parameters_.emplace(text, parameters_.size()).first->second;
        result.parameters.push_back({id, text, 0});
      }
    if ((*nodes_)[i].contains("bytes")) {
      auto& x = field(i, "bytes");
      if (!x.is_number_unsigned())
        fail(i, "bytes", found(x) + ", must be an integer, 0 or more");
      result.call_bytes = x;
    }
    return result;
  }

  // -- shape ------------------------------------------------------------------

  void check_tree(const model_info& model) const {
    std::vector<size_t> parents(model.size(), no_parent);
    for (size_t i = 0; i < model.size(); ++i)
      for (auto child : model[i].children) {
        auto& parent = parents[child.value];
        if (child.value == 0)
          fail(i, "children", "names the root, node 0: this is a cycle");
        if (child.value == i)
          fail(i, "children", "names the node itself: this is a cycle");
        if (parent == i)
          fail(i, "children", "names " + describe(child.value) + " twice");
        if (parent != no_parent)
          fail(i, "children",
               "names " + describe(child.value) + ", which is a child of "
                 + describe(parent) + " already: a node has one parent");
        parent = i;
      }
    // Each has one parent, so a node that is not below the root is below a node
    // without a parent, or in a cycle.
    enum class state : uint8_t { unknown, above, good };
    std::vector<state> states(model.size());
    states[0] = state::good;
    for (size_t i = 0; i < model.size(); ++i) {
      std::vector<size_t> way;
      auto at = i;
      for (; states[at] == state::unknown; at = parents[at]) {
        if (parents[at] == no_parent)
          fail(at, "children",
               "of no node names it: only the root, node 0, has no parent");
        states[at] = state::above;
        way.push_back(at);
      }
      if (states[at] == state::above)
        fail(at, "children", "leads back to the node itself: this is a cycle");
      for (auto x : way)
        states[x] = state::good;
    }
  }

  // -- times ------------------------------------------------------------------

  void read_step_seconds(const json& root, partition_tree& result) const {
    if (auto x = root.find("step_seconds"); x != root.end() && !x->is_null()) {
      if (!x->is_number() || !(x->get<double>() > 0))
        fail("field \"step_seconds\" " + found(*x)
             + ", must be a number of more than 0");
      result.step_seconds = *x;
      return;
    }
    auto& xs = result.model;
    auto compute = std::accumulate(
      xs.begin(), xs.end(), 0.0,
      [](double sum, auto& x) { return sum + *x.compute; });
    auto transfers = std::any_of(xs.begin(), xs.end(),
                                 [](auto& x) { return x.call_bytes > 0; });
    if (transfers && compute > 0)
      result.step_seconds = 3 * compute;
  }

  const std::string& name_;
  const json* nodes_ = nullptr;
  std::map<std::string, uint64_t> parameters_;
};

// -- writing ------------------------------------------------------------------

void add_decision(ordered_json& out, const partition_plan& plan,
                  const assignment& devices) {
  out["device"] = devices;
  out["loads"] = plan.loads;
  out["max_cost"] = plan.score.max_load;
  out["cut_requests"] = plan.score.requests;
  out["cut_bytes"] = plan.score.bytes;
  out["predicted"] = plan.score.predicted;
}

std::string text_of(const ordered_json& x, int indent) {
  return json_text(x, indent) + "\n";
}

std::string name_of(const model_info& model, module_id x) {
  return x.value == 0 ? "model" : model[x.value].path;
}

} // namespace

communication partition_tree::crossing() const {
  return step_seconds ? communication::from_times(*step_seconds)
                      : communication{};
}

partition_tree parse_partition_tree(const std::string& text,
                                    const std::string& name) {
  return tree_reader{name}.run(text);
}

std::string decision_json(const partition_plan& plan) {
  ordered_json out;
  add_decision(out, plan, plan.module_device);
  return text_of(out, -1);
}

std::string plan_json(const model_info& model, const partition_plan& plan,
                      const partition_notes& sharing) {
  auto compute = own_compute(model);
  ordered_json out;
  auto& nodes = out["nodes"] = ordered_json::array();
  for (size_t i = 0; i < plan.tree.size(); ++i) {
    auto& node = plan.tree[i];
    auto first = node.modules[0];
    ordered_json x;
    x["name"] = name_of(model, first);
    x["type"] = model[first.value].type;
    auto& names = x["modules"] = ordered_json::array();
    double memory = 0;
    double seconds = 0;
    uint64_t bytes = 0;
    for (auto module : node.modules) {
      names.push_back(name_of(model, module));
      memory += own_memory(model[module.value]);
      seconds += compute[module.value];
      bytes += model[module.value].call_bytes;
    }
    x["memory"] = memory;
    x["compute"] = seconds;
    x["cost"] = plan.costs.share(plan.costs.subtree(i));
    x["device"] = plan.node_device[i];
    x["parent"] = i == 0 ? ordered_json{} : ordered_json(node.parent);
    x["children"] = node.children;
    x["bytes"] = bytes;
    nodes.push_back(std::move(x));
  }
  add_decision(out, plan, plan.node_device);
  if (auto times = times_json(model); !times.is_null())
    out["modules"] = times;
  out["costs"] = plan.options.basis;
  out["warnings"] = plan.warnings;
  out["notes"] = plan.reasons;
  for (auto& x : sharing.all())
    out["sharing"].push_back({{"remark", x.text}, {"modules", x.modules}});
  return text_of(out, 1);
}

} // namespace smp
