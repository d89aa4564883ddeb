#include "runtime/session/module_remarks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace smp {

void module_remarks::add(const std::string& text, std::string module) {
  auto found = std::ranges::find_if(by_text_,
                                    [&](auto& x) { return x.first == text; });
  if (found == by_text_.end())
    found = by_text_.insert(found, {text, {}});
  found->second.push_back(std::move(module));
}

std::vector<std::string> module_remarks::lines() const {
  constexpr size_t max_names = 3;
  std::vector<std::string> result;
  for (auto& [text, names] : by_text_) {
    auto shown = std::min(names.size(), max_names);
    auto more = names.size() - shown;
    result.push_back(fmt::format(
      "{}: {}{}", text,
      fmt::join(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown),
                ", "),
      more > 0 ? fmt::format(" and {} more", more) : ""));
  }
  return result;
}

} // namespace smp
