#include "runtime/sharing/sharing_request_lookup.hpp"

#include <torch/nn/module.h>

#include <fmt/format.h>

#include <algorithm>

namespace smp {

namespace {

bool shares_itself(const walked_module& x) {
  return dynamic_cast<const shared_by_itself*>(x.object) != nullptr;
}

} // namespace

bool sharing_request_lookup::wanted(uint32_t module) const {
  return by_code(module).value_or(list_.contains(module));
}

std::string sharing_request_lookup::why_kept_out(uint32_t part,
                                                 uint32_t whole) const {
  for (auto i = part; i != whole && i != 0; i = model_.modules[i].parent)
    if (auto x = marked_.find(model_.modules[i].identity()); x != marked_.end())
      return x->second.enabled ? "" : "the program says so";
  auto* by = wanted(part) ? nullptr : list_.left_out_by(part);
  if (!by)
    return {};
  return fmt::format("\"{}\" in tensor_parallel.modules excludes it", *by);
}

/// The setting of user code for the module, or for its nearest ancestor.
std::optional<bool> sharing_request_lookup::by_code(uint32_t module) const {
  const auto* left_out = list_.left_out_by(module);
  while (true) {
    auto& m = model_.modules[module];
    if (auto x = marked_.find(m.identity()); x != marked_.end())
      return x->second.enabled;
    for (auto* hook : m.hooks)
      if (hook->sharing)
        return hook->sharing->enabled;
    // A setting for a layer also applies to its halves.
    if (shares_itself(m)
        && (module == 0 || !shares_itself(model_.modules[m.parent])))
      return left_out == nullptr;
    if (module == 0)
      return std::nullopt;
    module = m.parent;
  }
}

bool sharing_request_lookup::saves_memory(uint32_t module,
                                          bool otherwise) const {
  for (;; module = model_.modules[module].parent) {
    auto& m = model_.modules[module];
    if (auto x = marked_.find(m.identity());
        x != marked_.end() && x->second.saves_memory)
      return *x->second.saves_memory;
    for (auto* hook : m.hooks)
      if (hook->sharing && hook->sharing->saves_memory)
        return *hook->sharing->saves_memory;
    if (module == 0)
      return otherwise;
  }
}

bool sharing_request_lookup::named(uint32_t module) const {
  auto& m = model_.modules[module];
  return marked_.contains(m.identity())
         || std::ranges::any_of(m.hooks,
                                [](auto* x) { return x->sharing.has_value(); })
         || std::ranges::any_of(m.names, [&](auto& name) {
              return std::ranges::find(patterns_, name) != patterns_.end();
            });
}

} // namespace smp
