#include "partition/reasons.hpp"

#include "partition/manual.hpp"

#include <algorithm>
#include <map>

namespace smp {

namespace {

std::string join(const std::vector<std::string>& xs) {
  std::string result;
  for (size_t i = 0; i < xs.size(); ++i)
    result += (i == 0 ? "" : i + 1 == xs.size() ? " and " : ", ") + xs[i];
  return result;
}

std::string short_name(const model_info& model, module_id x) {
  auto& path = model[x.value].path;
  return path.empty() ? describe_module(model, x) : path;
}

class explainer {
public:
  explainer(const model_info& model, const partition_problem& p,
            const assignment& devices)
    : model_(model), p_(p), devices_(devices) {
    // nop
  }

  explanation run(const std::vector<paper_decision::surplus>& surplus) {
    idle(surplus);
    pulled();
    captive();
    ordered();
    return {std::move(warnings_), std::move(result_)};
  }

private:
  void idle(const std::vector<paper_decision::surplus>& surplus) {
    std::vector<bool> used(p_.devices);
    for (auto x : devices_)
      used[x] = true;
    for (auto& x : surplus) {
      std::vector<std::string> names;
      for (auto device : x.devices)
        if (!used[device]) {
          used[device] = true;
          names.push_back(std::to_string(device));
        }
      if (!names.empty())
        add_idle(names, "the share of "
                          + short_name(model_, p_.tree[x.node].modules[0])
                          + " was worth more than one device, but it has no"
                            " parts to share out");
    }
    std::vector<std::string> names;
    for (uint32_t device = 0; device < p_.devices; ++device)
      if (!used[device])
        names.push_back(std::to_string(device));
    if (names.empty())
      return;
    auto nodes = p_.tree.size();
    auto choice = std::any_of(p_.fixed.begin(), p_.fixed.end(),
                              [](auto& x) { return !x.has_value(); });
    if (nodes < p_.devices)
      add_idle(names, "only " + std::to_string(nodes)
                        + (nodes == 1 ? " part" : " parts")
                        + " of the model can be placed apart");
    else
      add_idle(names, choice ? "nothing that could be moved there would pay"
                             : "nothing is placed there");
  }

  void add_idle(const std::vector<std::string>& names, const std::string& why) {
    warnings_.push_back((names.size() == 1 ? "device " : "devices ")
                        + join(names) + (names.size() == 1 ? " stays" : " stay")
                        + " idle: " + why);
  }

  /// Shared tensors are a surprise only if a module is on another device than
  /// the module that contains it.
  void pulled() {
    std::map<std::pair<module_id, std::string>, std::vector<std::string>> xs;
    for (auto& merge : p_.tree.merges())
      if (merge.is_shared() && merge.with.value != 0)
        xs[{merge.with, describe_reason(merge)}].push_back(
          short_name(model_, merge.module));
    for (auto& [key, names] : xs)
      result_.push_back(
        join(names) + (names.size() == 1 ? " runs" : " run") + " on device "
        + std::to_string(devices_[p_.tree.node_of(key.first)]) + " with "
        + short_name(model_, key.first) + ": " + key.second);
  }

  void captive() {
    struct group {
      std::vector<module_id> modules;
      module_id parent;
      bool called = false; // they stay with a caller
    };
    // The same cause, such as a plain member of a block, shows in every block.
    std::map<std::pair<std::string, std::string>, group> groups;
    for (auto& merge : p_.tree.merges())
      if (!merge.is_shared()) {
        auto& path = model_[merge.module.value].path;
        auto leaf = path.substr(path.rfind('.') + 1);
        if (leaf.find_first_not_of("0123456789") == std::string::npos)
          leaf = "number";
        auto& x = groups[{merge.text, leaf}];
        if (x.modules.empty())
          x.parent = merge.with;
        x.called = merge.what == merge_reason::kind::unsendable;
        x.modules.push_back(merge.module);
      }
    for (auto& [key, x] : groups) {
      auto text = short_name(model_, x.modules[0]);
      auto more = x.modules.size() - 1;
      if (more > 0)
        text += " and " + std::to_string(more) + " like it stay with "
                + (x.called ? "what calls them" : "their parents");
      else
        text += " stays with " + short_name(model_, x.parent);
      result_.push_back(text + ": " + key.first);
    }
  }

  /// Modules that make a pipeline wait although no device is busy.
  void ordered() {
    std::vector<std::string> names;
    std::string why;
    for (size_t i = 0; i < model_.size() && p_.devices > 1; ++i)
      if (auto& x = model_[i].ordered; !x.empty()) {
        names.push_back(short_name(model_, module_id{i}));
        if (why.empty())
          why = x;
      }
    if (names.empty())
      return;
    auto more = names.size() - 1;
    result_.push_back(
      "microbatches pass " + names[0]
      + (more > 0 ? " and " + std::to_string(more) + " more" : "")
      + " in their order, as long as its state changes: " + why);
  }

  const model_info& model_;
  const partition_problem& p_;
  const assignment& devices_;
  std::vector<std::string> warnings_;
  std::vector<std::string> result_;
};

} // namespace

explanation explain(const model_info& model, const partition_problem& p,
                    const assignment& devices,
                    const std::vector<paper_decision::surplus>& surplus) {
  return explainer{model, p, devices}.run(surplus);
}

} // namespace smp
