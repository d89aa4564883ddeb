#include "runtime/session/sharing_wishes.hpp"

#include "runtime/base/name_pattern.hpp"

#include <algorithm>
#include <string_view>

namespace smp {

namespace {

/// That the module, or one above it, has.
bool fits_below(std::string_view pattern, std::string_view name) {
  while (true) {
    if (fits(pattern, name))
      return true;
    auto dot = name.rfind('.');
    if (dot == name.npos)
      return false;
    name = name.substr(0, dot);
  }
}

bool shares_itself(const walked_module& x) {
  return dynamic_cast<const shared_by_itself*>(x.object) != nullptr;
}

} // namespace

bool sharing_wishes::is_called(uint32_t module,
                               const std::string& pattern) const {
  return std::ranges::any_of(model_.modules[module].names, [&](auto& name) {
    return !name.empty() && fits_below(pattern, name);
  });
}

bool sharing_wishes::wanted(uint32_t module) const {
  return by_code(module).value_or(std::ranges::any_of(
    patterns_, [&](auto& x) { return is_called(module, x); }));
}

/// What code says of the module, or of the nearest one above it.
std::optional<bool> sharing_wishes::by_code(uint32_t module) const {
  while (true) {
    auto& m = model_.modules[module];
    if (auto x = marked_.find(m.identity()); x != marked_.end())
      return x->second.enabled;
    for (auto* hook : m.hooks)
      if (hook->sharing)
        return hook->sharing->enabled;
    // What is said of a layer is said of its halves.
    if (shares_itself(m)
        && (module == 0 || !shares_itself(model_.modules[m.parent])))
      return true;
    if (module == 0)
      return std::nullopt;
    module = m.parent;
  }
}

bool sharing_wishes::saves_memory(uint32_t module, bool otherwise) const {
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

bool sharing_wishes::named(uint32_t module) const {
  auto& m = model_.modules[module];
  return marked_.contains(m.identity())
         || std::ranges::any_of(m.hooks,
                                [](auto* x) { return x->sharing.has_value(); })
         || std::ranges::any_of(m.names, [&](auto& name) {
              return std::ranges::find(patterns_, name) != patterns_.end();
            });
}

} // namespace smp
