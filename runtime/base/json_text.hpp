#pragma once

#include <string>

namespace smp {

/// JSON is UTF-8, but module names and user strings may hold any bytes,
/// and that must not lose a report: each invalid byte becomes the
/// replacement character U+FFFD.
/// @param x a JSON value of nlohmann's types
/// @param indent -1: all in one line
template <class Json>
std::string json_text(const Json& x, int indent = -1) {
  return x.dump(indent, ' ', false, Json::error_handler_t::replace);
}

} // namespace smp
