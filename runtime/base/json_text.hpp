#pragma once

#include <string>

namespace smp {

/// JSON is UTF-8, names of modules and words of users may be anything, and
/// what was found out must not be lost for that: each byte that is none gets
/// the mark U+FFFD.
/// @param x of nlohmann's types
/// @param indent -1: all in one line
template <class Json>
std::string json_text(const Json& x, int indent = -1) {
  return x.dump(indent, ' ', false, Json::error_handler_t::replace);
}

} // namespace smp
