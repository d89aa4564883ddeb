#pragma once

#include <string_view>

namespace smp {

/// Tells whether `name` matches `pattern`, in which `*` stands for any
/// text: "encoder.*".
inline bool fits(std::string_view pattern, std::string_view name) {
  auto star = pattern.find('*');
  if (star == pattern.npos)
    return pattern == name;
  auto head = pattern.substr(0, star);
  auto rest = pattern.substr(star + 1);
  if (!name.starts_with(head))
    return false;
  for (auto i = head.size(); i <= name.size(); ++i)
    if (fits(rest, name.substr(i)))
      return true;
  return false;
}

/// Tells whether an entry of a list of patterns excludes what the entries
/// before it include: "!encoder.layer.11".
inline bool takes_away(std::string_view entry) {
  return entry.starts_with('!');
}

} // namespace smp
