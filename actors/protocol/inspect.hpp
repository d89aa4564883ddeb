#pragma once

// How CAF reads and writes values of lower folders, which know nothing of it.
// Free of CAF all the same: these are templates.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>

namespace smp {

template <class Inspector, class Tag>
bool inspect(Inspector& f, strong_id<Tag>& x) {
  return f.apply(x.value);
}

template <class Inspector>
bool inspect(Inspector& f, request_id& x) {
  return f.object(x).fields(f.field("origin", x.origin),
                            f.field("number", x.number));
}

/// For an enumeration whose last value is `last`.
template <class Inspector, class T>
bool inspect_enum(Inspector& f, T& x, T last) {
  auto get = [&x] { return static_cast<uint8_t>(x); };
  auto set = [&x, last](uint8_t y) {
    x = static_cast<T>(y);
    return y <= static_cast<uint8_t>(last);
  };
  return f.apply(get, set);
}

template <class Inspector>
bool inspect(Inspector& f, phase& x) {
  return inspect_enum(f, x, phase::backward);
}

template <class Inspector>
bool inspect(Inspector& f, error_code& x) {
  return inspect_enum(f, x, error_code::internal);
}

template <class Inspector>
bool inspect(Inspector& f, failure& x) {
  return f.object(x).fields(f.field("code", x.code), f.field("rank", x.rank),
                            f.field("module", x.module),
                            f.field("text", x.text));
}

} // namespace smp
