#include "runtime/model/partition_notes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace smp {

void partition_notes::add(const std::string& text, std::string module,
                          bool detail) {
  find(text, detail).modules.push_back(std::move(module));
}

void partition_notes::add(const std::string& text) {
  find(text, false);
}

std::vector<std::string> partition_notes::lines(bool all) const {
  constexpr size_t max_names = 3;
  std::vector<std::string> result;
  for (auto& [text, names, detail] : by_text_) {
    if (detail && !all)
      continue;
    auto shown = all ? names.size() : std::min(names.size(), max_names);
    auto more = names.size() - shown;
    result.push_back(fmt::format(
      "{}{}{}{}", text, names.empty() ? "" : ": ",
      fmt::join(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown),
                ", "),
      more > 0 ? fmt::format(" and {} more", more) : ""));
  }
  return result;
}

partition_notes::remark& partition_notes::find(const std::string& text,
                                               bool detail) {
  for (auto& x : by_text_)
    if (x.text == text && x.detail == detail)
      return x;
  return by_text_.emplace_back(remark{text, {}, detail});
}

} // namespace smp
