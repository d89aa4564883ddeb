#pragma once

// Maps and tuples as bytes (transport/bytes.hpp), for values that programs send
// each other.

#include "transport/bytes.hpp"

#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp {

namespace detail {

/// As pairs of key and value; a key that stands twice is malformed.
template <class Inspector, class Map>
bool inspect_map(Inspector& f, Map& x) {
  using entries = std::vector<
    std::pair<typename Map::key_type, typename Map::mapped_type>>;
  auto get = [&x] { return entries(x.begin(), x.end()); };
  auto set = [&x](entries ys) {
    auto size = ys.size();
    x.clear();
    for (auto& y : ys)
      x.insert(std::move(y));
    return x.size() == size;
  };
  return f.object(x).fields(f.field("entries", get, set));
}

} // namespace detail

template <class Inspector, class K, class V>
bool inspect(Inspector& f, std::map<K, V>& x) {
  return detail::inspect_map(f, x);
}

template <class Inspector, class K, class V>
bool inspect(Inspector& f, std::unordered_map<K, V>& x) {
  return detail::inspect_map(f, x);
}

template <class Inspector, class... Ts>
bool inspect(Inspector& f, std::tuple<Ts...>& x) {
  return std::apply(
    [&](auto&... ys) { return f.object(x).fields(f.field("element", ys)...); },
    x);
}

} // namespace smp
