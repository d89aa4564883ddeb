#include "runtime/placement/checkpointing_decision.hpp"

#include "runtime/base/name_pattern.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/model/module_list.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

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
    : model_(model),
      request_(x),
      stateful_(stateful),
      list_(model, x.patterns) {
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

  /// Of nested modules, chooses the outermost that can be checkpointed.
  void named() {
    list_.check("activation_checkpointing.modules");
    std::vector<bool> used(request_.patterns.size());
    std::vector<uint32_t> open{0};
    std::set<uint32_t> seen;
    while (!open.empty()) {
      auto i = open.back();
      open.pop_back();
      if (!seen.insert(i).second)
        continue;
      auto naming = list_.naming(i);
      auto why = naming.empty() ? std::string{} : why_not_named(i);
      auto below = at(i).children;
      if (!naming.empty() && why.empty()) {
        for (auto k : naming)
          used[k] = true;
        below = left_out_children(i);
        choose_named(i, below);
      } else if (!naming.empty() && below.empty() && !list_.left_out_by(i)) {
        result_.remarks.add("not computed again in backward, as " + why,
                            name(i));
      }
      open.insert(open.end(), below.rbegin(), below.rend());
    }
    check_used(used);
  }

  /// @returns the children that a named Sequential leaves out
  std::vector<uint32_t> left_out_children(uint32_t i) const {
    std::vector<uint32_t> result;
    if (is_sequential(i))
      for (auto child : at(i).children)
        if (list_.left_out_by(child))
          result.push_back(child);
    return result;
  }

  void choose_named(uint32_t i, const std::vector<uint32_t>& left_out) {
    auto how = request_.how;
    grouped_ = grouped_ || is_sequential(i);
    if (!is_sequential(i))
      how.strategy = "each";
    if (!request_.marked.contains(at(i).identity()))
      choose(i, how, left_out);
  }

  void check_used(const std::vector<bool>& used) const {
    auto& patterns = request_.patterns;
    for (size_t k = 0; k < used.size(); ++k)
      if (!used[k] && !takes_away(patterns[k]))
        throw config_error("activation_checkpointing.modules: "
                           + why_unused(k));
    if (!patterns.empty() && !grouped_ && request_.how.strategy != "each")
      throw config_error("activation_checkpointing.strategy = \""
                         + request_.how.strategy
                         + "\" has no effect: none of the modules is a "
                           "Sequential; name it, not its children");
  }

  std::string why_unused(size_t pattern) const {
    for (uint32_t i = 1; i < model_.modules.size(); ++i) {
      auto naming = list_.naming(i);
      if (std::ranges::find(naming, pattern) == naming.end())
        continue;
      if (auto why = why_not_named(i); !why.empty())
        return fmt::format("'{}' cannot be computed again: {}", name(i), why);
    }
    return fmt::format("what \"{}\" names is part of what others name",
                       request_.patterns[pattern]);
  }

  void choose(uint32_t i, const activation_checkpointing& how,
              const std::vector<uint32_t>& left_out = {}) {
    auto group = checkpointed_together(how.strategy).value();
    auto children = is_sequential(i);
    result_.chosen.push_back(
      {module_id{i}, children, group, how.preserve_rng_state, left_out});
    std::vector<std::string> others;
    for (auto child : left_out)
      others.push_back(name(child));
    result_.remarks.add(
      fmt::format("computed again in backward{}{}",
                  group == 1   ? ""
                  : group == 0 ? ", what follows each other on a rank together"
                               : fmt::format(", up to {} together", group),
                  how.preserve_rng_state ? "" : ", with other random numbers"),
      name(i) + (children ? ".*" : "") + (others.empty() ? "" : " without ")
        + fmt::format("{}", fmt::join(others, " and ")));
  }

  /// The same for a named module: a Sequential may leave children out, any
  /// other module nothing that is in it.
  std::string why_not_named(uint32_t i) const {
    if (!is_sequential(i) || i == 0 || list_.left_out_by(i))
      return why_not_whole(i);
    const auto& children = at(i).children;
    if (left_out_children(i).size() == children.size())
      return "everything in it is excluded";
    for (auto child : children)
      if (!list_.left_out_by(child))
        if (auto why = why_not_whole(child); !why.empty())
          return why;
    return {};
  }

  std::string why_not_whole(uint32_t i) const {
    for (auto below : model_.subtree(i))
      if (auto* by = list_.left_out_by(below))
        return fmt::format("\"{}\" excludes '{}'", *by, name(below));
    return why_not(i);
  }

  /// Why a module cannot be recomputed; empty if it can.
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
  module_list list_;
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
    auto begins = true;
    auto& children = model.modules[i].children;
    for (uint32_t k = 0; k < children.size(); ++k) {
      if (std::ranges::find(x.left_out, children[k]) != x.left_out.end()) {
        begins = true;
        continue;
      }
      auto full = x.group > 0 && k - first >= x.group;
      if (begins || full || owners[children[k]] != owners[children[first]])
        first = k;
      begins = false;
      put(children[k], children[first], x.same_numbers);
    }
  }
  return result;
}

} // namespace smp
