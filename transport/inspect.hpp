#pragma once

// A type that crosses ranks lists its fields once: `inspect(f, x)` serves all
// readers and writers of them, be it bytes (transport/bytes.hpp) or CAF's
// inspectors, whose style this follows. So nothing here depends on either.
//
//   template <class Inspector>
//   bool inspect(Inspector& f, request_id& x) {
//     return f.object(x).fields(f.field("origin", x.origin),
//                               f.field("number", x.number));
//   }
//
// An enumeration declares its last value next to its definition:
//
//   constexpr phase last_of(phase) { return phase::backward; }

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"
#include "transport/wait_subject.hpp"

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace smp {

/// An enumeration whose values are 0 to `last_of`.
template <class T>
concept ranged_enum = std::is_enum_v<T> && requires(T x) {
  { last_of(x) } -> std::same_as<T>;
};

template <class Inspector, ranged_enum T>
bool inspect(Inspector& f, T& x) {
  auto get = [&x] { return static_cast<uint8_t>(x); };
  auto set = [&x](uint8_t y) {
    if (y > static_cast<uint8_t>(last_of(x)))
      return false;
    x = static_cast<T>(y);
    return true;
  };
  return f.apply(get, set);
}

template <class Inspector, class Tag>
bool inspect(Inspector& f, strong_id<Tag>& x) {
  return f.apply(x.value);
}

template <class Inspector>
bool inspect(Inspector& f, request_id& x) {
  return f.object(x).fields(f.field("origin", x.origin),
                            f.field("number", x.number));
}

template <class Inspector>
bool inspect(Inspector& f, object_id& x) {
  return f.object(x).fields(f.field("owner", x.owner),
                            f.field("number", x.number),
                            f.field("generation", x.generation));
}

template <class Inspector>
bool inspect(Inspector& f, failure& x) {
  return f.object(x).fields(f.field("code", x.code), f.field("rank", x.rank),
                            f.field("module", x.module),
                            f.field("text", x.text),
                            f.field("machine", x.machine));
}

template <class Inspector>
bool inspect(Inspector& f, wait_subject& x) {
  return f.object(x).fields(f.field("what", x.what), f.field("name", x.name),
                            f.field("group", x.group),
                            f.field("called", x.called));
}

template <class Inspector>
bool inspect(Inspector& f, device_ref& x) {
  auto get = [&x] { return x.index; };
  auto set = [&x](int16_t y) {
    x.index = y;
    return y >= -1 && y <= max_device_index;
  };
  return f.object(x).fields(f.field("type", x.type),
                            f.field("index", get, set));
}

/// Only a flag if the tensor is row-major. Its shape is known by now.
template <class Inspector>
auto strides_field(Inspector& f, tensor_meta& x) {
  auto get = [&x] {
    return x.strides.empty() ? std::nullopt : std::optional{x.strides};
  };
  auto set = [&x](std::optional<std::vector<int64_t>> y) {
    auto any = y.has_value();
    x.strides = std::move(y).value_or(std::vector<int64_t>{});
    return !any || (!x.strides.empty() && are_strides(x.strides, x.shape));
  };
  return f.field("strides", get, set);
}

/// A tensor without its bytes, which travel separately.
template <class Inspector>
bool inspect_outline(Inspector& f, tensor_ref& x) {
  auto get = [&x]() -> const std::vector<int64_t>& { return x.shape; };
  auto set = [&x](std::vector<int64_t> y) {
    x.shape = std::move(y);
    return std::none_of(x.shape.begin(), x.shape.end(),
                        [](auto size) { return size < 0; });
  };
  return f.object(x).fields(
    f.field("nbytes", x.nbytes), f.field("dtype", x.dtype),
    f.field("device", x.device), f.field("lent", x.lent),
    f.field("shape", get, set), strides_field(f, x));
}

} // namespace smp
