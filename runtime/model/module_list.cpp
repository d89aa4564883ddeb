#include "runtime/model/module_list.hpp"

#include "runtime/base/name_pattern.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace smp {

namespace {

std::string_view pattern_in(std::string_view entry) {
  return takes_away(entry) ? entry.substr(1) : entry;
}

/// Whether the pattern matches the module, or one above it.
bool fits_path(std::string_view pattern, std::string_view name) {
  while (true) {
    if (fits(pattern, name))
      return true;
    auto dot = name.rfind('.');
    if (dot == name.npos)
      return false;
    name = name.substr(0, dot);
  }
}

} // namespace

module_list::module_list(const walked_model& model,
                         const std::vector<std::string>& entries)
  : model_(model),
    entries_(entries),
    uses_(entries.size()),
    last_(model.modules.size()) {
  for (uint32_t i = 0; i < last_.size(); ++i)
    for (size_t k = 0; k < entries_.size(); ++k) {
      auto& entry = entries_[k];
      if (std::ranges::none_of(model_.modules[i].names, [&](auto& name) {
            return !name.empty() && fits_path(pattern_in(entry), name);
          }))
        continue;
      auto& x = uses_[k];
      if (!x.module)
        x.module = i;
      if (!takes_away(entry) || contains(i))
        x.does_something = true;
      last_[i] = &entry;
    }
}

void module_list::check(const std::string& key) const {
  for (size_t k = 0; k < entries_.size(); ++k) {
    auto& entry = entries_[k];
    auto& x = uses_[k];
    if (!x.module)
      throw config_error(
        fmt::format("{}: no module is called {}\"{}\"{}; {}", key,
                    takes_away(entry) ? "what " : "", entry,
                    takes_away(entry) ? " takes away" : "",
                    model_.existing_near(std::string{pattern_in(entry)})));
    if (!x.does_something)
      throw config_error(
        fmt::format("{}: \"{}\" takes nothing away, as no entry before it "
                    "names '{}'",
                    key, entry, model_.modules[*x.module].names.front()));
  }
}

bool module_list::contains(uint32_t module) const {
  return last_[module] != nullptr && !takes_away(*last_[module]);
}

const std::string* module_list::left_out_by(uint32_t module) const {
  auto* x = last_[module];
  return x != nullptr && takes_away(*x) ? x : nullptr;
}

std::vector<size_t> module_list::naming(uint32_t module) const {
  std::vector<size_t> result;
  for (size_t k = 0; k < entries_.size(); ++k)
    if (!takes_away(entries_[k])
        && std::ranges::any_of(model_.modules[module].names, [&](auto& name) {
             return !name.empty() && fits(entries_[k], name);
           }))
      result.push_back(k);
  return result;
}

} // namespace smp
