#pragma once

#include <string>
#include <string_view>

namespace smp {

/// @param type of a module, demangled
/// @returns what its user wrote: "smp::hooked<x>" is an x
inline std::string type_for_user(std::string type) {
  constexpr std::string_view prefix = "smp::hooked<";
  if (type.starts_with(prefix) && type.ends_with('>'))
    type = type.substr(prefix.size(), type.size() - prefix.size() - 1);
  return type;
}

} // namespace smp
