#include "runtime/session/checkpointing_decision.hpp"

#include "runtime/base/name_pattern.hpp"
#include "runtime/config/session_config.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace smp {

namespace {

class checkpointing_decider {
public:
  checkpointing_decider(const walked_model& model,
                        const checkpointing_request& x,
                        const std::map<const void*, std::string>& stateful)
    : model_(model), request_(x), stateful_(stateful) {
    // nop
  }

  checkpointing_decision run() {
    marked();
    named();
    return std::move(result_);
  }

private:
  const walked_module& at(uint32_t i) const {
    return model_.modules[i];
  }

  const std::string& name(uint32_t i) const {
    return at(i).names.front();
  }

  bool is_sequential(uint32_t i) const {
    return at(i).sequential && !at(i).children.empty();
  }

  void marked() {
    for (uint32_t i = 0; i < model_.modules.size(); ++i)
      if (auto x = request_.marked.find(at(i).identity());
          x != request_.marked.end()) {
        check_checkpointing(x->second, is_sequential(i));
        if (auto why = why_not(i); !why.empty())
          throw config_error("activation checkpointing of '" + name(i)
                             + "': " + why);
        choose(i, x->second);
      }
  }

  /// Of modules inside each other the outermost is meant that can be.
  void named() {
    std::vector<bool> used(request_.patterns.size());
    std::vector<uint32_t> open{0};
    std::set<uint32_t> seen;
    while (!open.empty()) {
      auto i = open.back();
      open.pop_back();
      if (!seen.insert(i).second)
        continue;
      auto fitting = fitting_patterns(i);
      auto why = why_not(i);
      if (fitting.empty() || !why.empty()) {
        if (!fitting.empty() && at(i).children.empty())
          result_.remarks.add("not computed again in backward, as " + why,
                              name(i));
        auto& children = at(i).children;
        open.insert(open.end(), children.rbegin(), children.rend());
        continue;
      }
      for (auto k : fitting)
        used[k] = true;
      choose_named(i);
    }
    check_used(used);
  }

  void choose_named(uint32_t i) {
    auto how = request_.how;
    grouped_ = grouped_ || is_sequential(i);
    if (!is_sequential(i))
      how.strategy = "each";
    if (!request_.marked.contains(at(i).identity()))
      choose(i, how);
  }

  void check_used(const std::vector<bool>& used) const {
    auto& patterns = request_.patterns;
    for (size_t k = 0; k < used.size(); ++k)
      if (!used[k]) {
        std::string why;
        for (uint32_t i = 1; i < model_.modules.size() && why.empty(); ++i)
          if (any_name_fits(patterns[k], i))
            why = fmt::format("'{}' cannot be computed again: {}", name(i),
                              why_not(i));
        if (why.empty())
          why = fmt::format("no module is called \"{}\"; {}", patterns[k],
                            model_.existing_near(patterns[k]));
        throw config_error("activation_checkpointing.modules: " + why);
      }
    if (!patterns.empty() && !grouped_ && request_.how.strategy != "each")
      throw config_error("activation_checkpointing.strategy = \""
                         + request_.how.strategy
                         + "\" has no effect: none of the modules is a "
                           "Sequential; name it, not its children");
  }

  /// @returns positions of the patterns that fit a name of the module.
  std::vector<size_t> fitting_patterns(uint32_t i) const {
    std::vector<size_t> result;
    for (size_t k = 0; k < request_.patterns.size(); ++k)
      if (any_name_fits(request_.patterns[k], i))
        result.push_back(k);
    return result;
  }

  bool any_name_fits(const std::string& pattern, uint32_t i) const {
    return std::ranges::any_of(
      at(i).names, [&](auto& x) { return !x.empty() && fits(pattern, x); });
  }

  void choose(uint32_t i, const activation_checkpointing& how) {
    auto group = checkpointed_together(how.strategy).value();
    auto children = is_sequential(i);
    result_.chosen.push_back(
      {module_id{i}, children, group, how.preserve_rng_state});
    result_.remarks.add(
      fmt::format("computed again in backward{}{}",
                  group == 1   ? ""
                  : group == 0 ? ", what follows each other on a rank together"
                               : fmt::format(", up to {} together", group),
                  how.preserve_rng_state ? "" : ", with other random numbers"),
      name(i) + (children ? ".*" : ""));
  }

  /// Why a module cannot be computed again; empty if it can.
  std::string why_not(uint32_t i) const {
    if (i == 0)
      return "the model as a whole is not called by a module; name its parts";
    if (is_sequential(i)) {
      for (auto child : at(i).children)
        if (auto why = why_not(child); !why.empty())
          return why;
      return {};
    }
    if (!at(i).intercepted)
      return at(i).container
               ? "it is a container that is not called itself; name what is "
                 "in it"
               : "its calls cannot be seen; declare it as smp::submodule, or "
                 "put it into a Sequential";
    for (auto below : model_.modules_below(name(i)))
      if (auto x = stateful_.find(at(below).identity()); x != stateful_.end())
        return fmt::format("'{}' has state that smp cannot put back (it {})",
                           name(below), x->second);
    return {};
  }

  const walked_model& model_;
  const checkpointing_request& request_;
  const std::map<const void*, std::string>& stateful_;
  bool grouped_ = false; // a Sequential was named
  checkpointing_decision result_;
};

} // namespace

checkpointing_decision
decide_checkpointing(const walked_model& model, const checkpointing_request& x,
                     const std::map<const void*, std::string>& stateful) {
  return checkpointing_decider{model, x, stateful}.run();
}

std::vector<recomputation>
regions_of(const walked_model& model,
           const std::vector<checkpointing_choice>& chosen,
           const std::vector<rank_id>& owners) {
  std::vector<recomputation> result(model.modules.size());
  auto put = [&](uint32_t module, uint32_t first, bool same_numbers) {
    result[module] = {first + 1, same_numbers};
  };
  for (auto& x : chosen) {
    auto i = static_cast<uint32_t>(x.module.value);
    if (!x.children) {
      put(i, i, x.same_numbers);
      continue;
    }
    uint32_t first = 0; // child with which the region begins
    auto& children = model.modules[i].children;
    for (uint32_t k = 0; k < children.size(); ++k) {
      auto full = x.group > 0 && k - first >= x.group;
      if (full || owners[children[k]] != owners[children[first]])
        first = k;
      put(children[k], children[first], x.same_numbers);
    }
  }
  return result;
}

} // namespace smp
