#pragma once

// How a batch becomes microbatches.

#include "runtime/values/pack.hpp"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

/// One microbatch's part of a tensor: slice `index` of `n` equal ones along
/// `axis`, a view.
/// @throws error (config) if `n` does not divide the axis
at::Tensor slice_tensor(const at::Tensor& x, uint64_t n, uint64_t index,
                        int64_t axis);

/// Splits a type of the user's own, found by ADL:
/// `my_batch smp_slice(const my_batch&, uint64_t n, uint64_t index,
///                     int64_t axis)`.
template <class T>
concept sliceable = requires(const T& x) {
  {smp_slice(x, uint64_t{}, uint64_t{}, int64_t{})};
};

/// A value without samples of its own: a number, an enum, a pointer, a
/// function.
template <class T>
concept without_samples = !std::is_class_v<T> || requires {
  &T::operator();
}
|| requires {
  &T::operator->;
};

/// A class that may hold samples in a way that smp cannot see.
/// @throws error (config): whoever wrote it has to say
[[noreturn]] void refuse_to_split(const std::type_info& type);

/// Splits tensors, also inside the containers that modules accept
/// (runtime/values/pack.hpp): vectors, arrays, maps, unordered maps, tuples,
/// pairs, optionals and variants. Any other value goes whole to every
/// microbatch, if it has no tensors.
/// @throws error (config) for a class that has, or may have
template <class T>
struct splitter {
  static T slice(const T& x, uint64_t n, uint64_t index, int64_t axis) {
    if constexpr (sliceable<T>) {
      return smp_slice(x, n, index, axis);
    } else {
      if constexpr (!without_samples<T> && !packable<T>)
        refuse_to_split(typeid(T));
      if constexpr (!without_samples<T> && packable<T>) {
        packer p;
        put_value(p, x);
        if (!p.tensors().empty())
          refuse_to_split(typeid(T));
      }
      return x;
    }
  }
};

template <class T>
T split(const T& x, uint64_t n, uint64_t index, int64_t axis) {
  return splitter<T>::slice(x, n, index, axis);
}

template <>
struct splitter<at::Tensor> {
  static at::Tensor slice(const at::Tensor& x, uint64_t n, uint64_t index,
                          int64_t axis) {
    return slice_tensor(x, n, index, axis);
  }
};

template <class T>
struct splitter<std::vector<T>> {
  static std::vector<T> slice(const std::vector<T>& xs, uint64_t n,
                              uint64_t index, int64_t axis) {
    std::vector<T> result;
    for (auto& x : xs)
      result.push_back(split(x, n, index, axis));
    return result;
  }
};

template <class T, size_t N>
struct splitter<std::array<T, N>> {
  static std::array<T, N> slice(const std::array<T, N>& xs, uint64_t n,
                                uint64_t index, int64_t axis) {
    auto result = xs;
    for (auto& x : result)
      x = split(x, n, index, axis);
    return result;
  }
};

template <class K, class T>
struct splitter<std::map<K, T>> {
  static std::map<K, T> slice(const std::map<K, T>& xs, uint64_t n,
                              uint64_t index, int64_t axis) {
    std::map<K, T> result;
    for (auto& [key, x] : xs)
      result.emplace(key, split(x, n, index, axis));
    return result;
  }
};

template <class K, class T>
struct splitter<std::unordered_map<K, T>> {
  static std::unordered_map<K, T> slice(const std::unordered_map<K, T>& xs,
                                        uint64_t n, uint64_t index,
                                        int64_t axis) {
    std::unordered_map<K, T> result;
    for (auto& [key, x] : xs)
      result.emplace(key, split(x, n, index, axis));
    return result;
  }
};

template <class T>
struct splitter<std::optional<T>> {
  static std::optional<T> slice(const std::optional<T>& x, uint64_t n,
                                uint64_t index, int64_t axis) {
    return x ? std::optional<T>{split(*x, n, index, axis)} : std::nullopt;
  }
};

template <class A, class B>
struct splitter<std::pair<A, B>> {
  static std::pair<A, B> slice(const std::pair<A, B>& x, uint64_t n,
                               uint64_t index, int64_t axis) {
    return {split(x.first, n, index, axis), split(x.second, n, index, axis)};
  }
};

template <class... Ts>
struct splitter<std::tuple<Ts...>> {
  static std::tuple<Ts...> slice(const std::tuple<Ts...>& x, uint64_t n,
                                 uint64_t index, int64_t axis) {
    return std::apply(
      [&](auto&... xs) {
        return std::tuple<Ts...>{split(xs, n, index, axis)...};
      },
      x);
  }
};

/// Keeps the alternative, even where several have the same type.
template <class... Ts>
struct splitter<std::variant<Ts...>> {
  static std::variant<Ts...> slice(const std::variant<Ts...>& x, uint64_t n,
                                   uint64_t index, int64_t axis) {
    auto result = x;
    std::visit([&](auto& y) { y = split(y, n, index, axis); }, result);
    return result;
  }
};

} // namespace smp
