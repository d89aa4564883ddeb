#pragma once

// Converts C++ arguments and results to values and back. A module whose
// `forward` takes or returns a type of the user works remotely once `smp::pack`
// is specialised for it:
//
//   template <>
//   struct smp::pack<my_state> {
//     static smp::value put(smp::packer& p, const my_state& x) {
//       return smp::put_value(p, std::tie(x.hidden, x.length));
//     }
//     static my_state get(smp::unpacker& u, const smp::value& x) {
//       auto [hidden, length]
//         = smp::get_value<std::tuple<at::Tensor, int64_t>>(u, x);
//       return {hidden, length};
//     }
//   };

#include "runtime/values/packer.hpp"

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <array>
#include <complex>
#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

// -- the trait ----------------------------------------------------------------

/// Customization point. `put` converts a T to a value, `get` converts it
/// back. A type that only views data (string_view, ArrayRef) comes back as
/// the type that owns it.
template <class T>
struct pack;

/// True for types that can be sent.
template <class T>
concept packable = requires(packer& p, const T& x) {
  { pack<T>::put(p, x) } -> std::same_as<value>;
};

/// True for types that can be received.
template <class T>
concept unpackable = requires(unpacker& u, const value& x) {
  pack<T>::get(u, x);
};

/// What a T becomes on the receiving rank; it is passed where a T was.
template <unpackable T>
using unpacked_t = decltype(pack<T>::get(std::declval<unpacker&>(),
                                         std::declval<const value&>()));

/// True for types that come back as themselves, so that containers of them do.
template <class T>
concept owning = unpackable<T> && std::same_as<unpacked_t<T>, T>;

/// Converts `x` to a value.
template <class T>
value put_value(packer& p, const T& x) {
  static_assert(packable<T>,
                "smp cannot send this type to another rank: specialise "
                "smp::pack<T> for it (see the top of runtime/values/pack.hpp)");
  return pack<T>::put(p, x);
}

/// Converts `x` to a T, or to the type that owns a T's data.
template <class T>
auto get_value(unpacker& u, const value& x) {
  static_assert(unpackable<T>,
                "smp cannot receive this type from another rank: specialise "
                "smp::pack<T> for it (see the top of runtime/values/pack.hpp)");
  return pack<T>::get(u, x);
}

// -- tensors ------------------------------------------------------------------

template <>
struct pack<at::Tensor> {
  static value put(packer& p, const at::Tensor& x);
  static at::Tensor get(unpacker& u, const value& x);
};

// -- numbers ------------------------------------------------------------------

template <>
struct pack<bool> {
  static value put(packer&, bool x) {
    return value::of(x);
  }
  static bool get(unpacker& u, const value& x);
};

template <>
struct pack<int64_t> {
  static value put(packer&, int64_t x) {
    return value::of(x);
  }
  static int64_t get(unpacker& u, const value& x);
};

/// All other integers; one that an int64 cannot hold is refused.
template <std::integral T>
struct pack<T> {
  static value put(packer& p, T x) {
    auto result = static_cast<int64_t>(x);
    if (std::is_unsigned_v<T> && result < 0)
      p.refuse(std::to_string(x) + " does not fit into 64 bits with sign");
    return value::of(result);
  }
  static T get(unpacker& u, const value& x) {
    auto result = pack<int64_t>::get(u, x);
    if (static_cast<int64_t>(static_cast<T>(result)) != result
        || (std::is_unsigned_v<T> && result < 0))
      u.fail(std::to_string(result) + " is out of the range of its type");
    return static_cast<T>(result);
  }
};

template <class T>
requires std::is_enum_v<T>
struct pack<T> {
  using base = std::underlying_type_t<T>;
  static value put(packer& p, T x) {
    return pack<base>::put(p, static_cast<base>(x));
  }
  static T get(unpacker& u, const value& x) {
    return static_cast<T>(pack<base>::get(u, x));
  }
};

template <>
struct pack<double> {
  static value put(packer&, double x) {
    return value::of(x);
  }
  static double get(unpacker& u, const value& x);
};

template <>
struct pack<float> {
  static value put(packer&, float x) {
    return value::of(static_cast<double>(x));
  }
  static float get(unpacker& u, const value& x) {
    return static_cast<float>(pack<double>::get(u, x));
  }
};

template <>
struct pack<std::complex<double>> {
  static value put(packer&, std::complex<double> x) {
    return value::of(x);
  }
  static std::complex<double> get(unpacker& u, const value& x);
};

template <>
struct pack<std::complex<float>> {
  static value put(packer&, std::complex<float> x) {
    return value::of(std::complex<double>{x});
  }
  static std::complex<float> get(unpacker& u, const value& x) {
    return std::complex<float>{pack<std::complex<double>>::get(u, x)};
  }
};

template <class F>
struct pack<c10::complex<F>> {
  static value put(packer&, c10::complex<F> x) {
    return value::of(std::complex<double>{x.real(), x.imag()});
  }
  static c10::complex<F> get(unpacker& u, const value& x) {
    auto y = pack<std::complex<double>>::get(u, x);
    return {static_cast<F>(y.real()), static_cast<F>(y.imag())};
  }
};

template <>
struct pack<std::monostate> {
  static value put(packer&, std::monostate) {
    return {};
  }
  static std::monostate get(unpacker& u, const value& x);
};

// -- types of the tensor library ----------------------------------------------

template <>
struct pack<c10::Scalar> {
  static value put(packer& p, const c10::Scalar& x);
  static c10::Scalar get(unpacker& u, const value& x);
};

template <>
struct pack<c10::Device> {
  static value put(packer&, c10::Device x) {
    return value::of(device_ref{static_cast<uint8_t>(x.type()), x.index()});
  }
  static c10::Device get(unpacker& u, const value& x);
};

template <>
struct pack<c10::ScalarType> {
  static value put(packer&, c10::ScalarType x) {
    return value::of(dtype_value{static_cast<uint8_t>(x)});
  }
  static c10::ScalarType get(unpacker& u, const value& x);
};

/// What TorchScript modules take and return: none, tensors, numbers, strings,
/// devices, lists, tuples and dicts of them, with their TorchScript types.
/// Objects and named tuples are refused by name. Needs ATen/core/ivalue.h.
template <>
struct pack<c10::IValue> {
  static value put(packer& p, const c10::IValue& x);
  static c10::IValue get(unpacker& u, const value& x);
};

// -- strings ------------------------------------------------------------------

template <>
struct pack<std::string> {
  static value put(packer&, const std::string& x) {
    return value::of(x);
  }
  static std::string get(unpacker& u, const value& x);
};

template <>
struct pack<std::string_view> {
  static value put(packer&, std::string_view x) {
    return value::of(x);
  }
  static std::string get(unpacker& u, const value& x) {
    return pack<std::string>::get(u, x);
  }
};

template <>
struct pack<const char*> {
  static value put(packer& p, const char* x) {
    if (x == nullptr)
      p.refuse("a null pointer is not a string");
    return value::of(x);
  }
  static std::string get(unpacker& u, const value& x) {
    return pack<std::string>::get(u, x);
  }
};

// -- nothing and maybe --------------------------------------------------------

template <>
struct pack<std::nullopt_t> {
  static value put(packer&, std::nullopt_t) {
    return {};
  }
  static std::nullopt_t get(unpacker& u, const value& x);
};

template <>
struct pack<std::nullptr_t> {
  static value put(packer&, std::nullptr_t) {
    return {};
  }
  static std::nullptr_t get(unpacker& u, const value& x);
};

template <class T>
struct is_optional : std::false_type {};

template <class T>
struct is_optional<std::optional<T>> : std::true_type {};

/// Nested optionals are refused: a value would lose one of the levels.
template <class T>
requires(!is_optional<T>::value) struct pack<std::optional<T>> {
  static value put(packer& p, const std::optional<T>& x) requires packable<T> {
    return x ? pack<T>::put(p, *x) : value{};
  }
  static auto get(unpacker& u, const value& x) requires unpackable<T> {
    if (x.kind() == value_kind::none)
      return std::optional<unpacked_t<T>>{};
    return std::optional<unpacked_t<T>>{pack<T>::get(u, x)};
  }
};

// -- sequences ----------------------------------------------------------------

namespace detail {

/// @returns the items of a list. @throws error if `x` is none
const std::vector<value>& list_items(unpacker& u, const value& x);

/// @returns the items of a tuple of `size`. @throws error if `x` is none
const std::vector<value>& tuple_items(unpacker& u, const value& x, size_t size);

/// @returns the items of a dict. @throws error if `x` is none
const std::vector<std::pair<value, value>>& dict_items(unpacker& u,
                                                       const value& x);

template <class T, class Range>
value put_list(packer& p, const Range& xs) {
  std::vector<value> result;
  result.reserve(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    value_path::scope here{p, "item", i};
    result.push_back(pack<T>::put(p, xs[i]));
  }
  return value::list(std::move(result));
}

template <class Tuple>
value put_tuple(packer& p, const Tuple& x) {
  return [&]<size_t... I>(std::index_sequence<I...>) {
    [[maybe_unused]] auto one = [&p]<class T>(size_t i, const T& item) {
      value_path::scope here{p, "element", i};
      return pack<T>::put(p, item);
    };
    std::vector<value> items;
    items.reserve(sizeof...(I));
    (items.push_back(one(I, std::get<I>(x))), ...);
    return value::tuple(std::move(items));
  }
  (std::make_index_sequence<std::tuple_size_v<Tuple>>{});
}

template <class Tuple>
Tuple get_tuple(unpacker& u, const value& x) {
  [[maybe_unused]] auto& items = tuple_items(u, x, std::tuple_size_v<Tuple>);
  return [&]<size_t... I>(std::index_sequence<I...>) {
    [[maybe_unused]] auto one = [&]<class T>(std::type_identity<T>, size_t i) {
      value_path::scope here{u, "element", i};
      return pack<T>::get(u, items[i]);
    };
    // Braces evaluate from left to right.
    return Tuple{
      one(std::type_identity<std::tuple_element_t<I, Tuple>>{}, I)...};
  }
  (std::make_index_sequence<std::tuple_size_v<Tuple>>{});
}

template <class Map>
value put_dict(packer& p, const Map& xs) {
  std::vector<std::pair<value, value>> items;
  items.reserve(xs.size());
  for (auto& [key, mapped] : xs) {
    value_path::scope here{p, "entry", items.size()};
    auto k = pack<typename Map::key_type>::put(p, key);
    auto v = pack<typename Map::mapped_type>::put(p, mapped);
    items.emplace_back(std::move(k), std::move(v));
  }
  return value::dict(std::move(items));
}

template <class Map>
Map get_dict(unpacker& u, const value& x) {
  Map result;
  size_t i = 0;
  for (auto& [key, mapped] : dict_items(u, x)) {
    value_path::scope here{u, "entry", i++};
    auto k = pack<typename Map::key_type>::get(u, key);
    if (!result
           .emplace(std::move(k),
                    pack<typename Map::mapped_type>::get(u, mapped))
           .second)
      u.fail("this key stands twice in its dict");
  }
  return result;
}

} // namespace detail

template <class T>
struct pack<std::vector<T>> {
  static value put(packer& p, const std::vector<T>& xs) requires packable<T> {
    return detail::put_list<T>(p, xs);
  }
  static std::vector<T> get(unpacker& u, const value& x) requires owning<T> {
    auto& items = detail::list_items(u, x);
    std::vector<T> result;
    result.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      value_path::scope here{u, "item", i};
      result.push_back(pack<T>::get(u, items[i]));
    }
    return result;
  }
};

/// Views: sent as the list that they view, received as a vector.
template <class T>
struct pack<c10::ArrayRef<T>> {
  static value put(packer& p, const c10::ArrayRef<T>& xs) requires packable<T> {
    return detail::put_list<T>(p, xs);
  }
  static std::vector<T> get(unpacker& u, const value& x) requires owning<T> {
    return pack<std::vector<T>>::get(u, x);
  }
};

template <class T, size_t N>
struct pack<std::array<T, N>> {
  static value put(packer& p, const std::array<T, N>& xs) requires packable<T> {
    return detail::put_tuple(p, xs);
  }
  static std::array<T, N> get(unpacker& u, const value& x) requires owning<T> {
    return detail::get_tuple<std::array<T, N>>(u, x);
  }
};

/// Elements may be references when sent (`std::tie`).
template <class... Ts>
struct pack<std::tuple<Ts...>> {
  static value put(packer& p, const std::tuple<Ts...>& x) requires(
    packable<std::remove_cvref_t<Ts>>&&...) {
    return detail::put_tuple(p, x);
  }
  static std::tuple<Ts...> get(unpacker& u,
                               const value& x) requires(owning<Ts>&&...) {
    return detail::get_tuple<std::tuple<Ts...>>(u, x);
  }
};

template <class A, class B>
struct pack<std::pair<A, B>> {
  static value
  put(packer& p, const std::pair<A, B>& x) requires(packable<A>&& packable<B>) {
    return detail::put_tuple(p, x);
  }
  static std::pair<A, B> get(unpacker& u,
                             const value& x) requires(owning<A>&& owning<B>) {
    return detail::get_tuple<std::pair<A, B>>(u, x);
  }
};

// -- dictionaries -------------------------------------------------------------

template <class K, class T>
struct pack<std::map<K, T>> {
  static value
  put(packer& p, const std::map<K, T>& xs) requires(packable<K>&& packable<T>) {
    return detail::put_dict(p, xs);
  }
  static std::map<K, T> get(unpacker& u,
                            const value& x) requires(owning<K>&& owning<T>) {
    return detail::get_dict<std::map<K, T>>(u, x);
  }
};

/// Keeps the order of its entries.
template <class K, class T>
struct pack<torch::OrderedDict<K, T>> {
  static value
  put(packer& p,
      const torch::OrderedDict<K, T>& xs) requires(packable<K>&& packable<T>) {
    std::vector<std::pair<value, value>> items;
    items.reserve(xs.size());
    for (auto& x : xs) {
      value_path::scope here{p, "entry", items.size()};
      auto key = pack<K>::put(p, x.key());
      items.emplace_back(std::move(key), pack<T>::put(p, x.value()));
    }
    return value::dict(std::move(items));
  }
  static torch::OrderedDict<K, T>
  get(unpacker& u, const value& x) requires(owning<K>&& owning<T>) {
    torch::OrderedDict<K, T> result;
    size_t i = 0;
    for (auto& [key, item] : detail::dict_items(u, x)) {
      value_path::scope here{u, "entry", i++};
      auto k = pack<K>::get(u, key);
      if (result.contains(k))
        u.fail("this key stands twice in its dict");
      result.insert(std::move(k), pack<T>::get(u, item));
    }
    return result;
  }
};

template <class K, class T>
struct pack<std::unordered_map<K, T>> {
  static value
  put(packer& p,
      const std::unordered_map<K, T>& xs) requires(packable<K>&& packable<T>) {
    return detail::put_dict(p, xs);
  }
  static std::unordered_map<K, T>
  get(unpacker& u, const value& x) requires(owning<K>&& owning<T>) {
    return detail::get_dict<std::unordered_map<K, T>>(u, x);
  }
};

// -- alternatives -------------------------------------------------------------

/// The position of the alternative, then its value.
template <class... Ts>
struct pack<std::variant<Ts...>> {
  static value put(packer& p,
                   const std::variant<Ts...>& x) requires(packable<Ts>&&...) {
    if (x.valueless_by_exception())
      p.refuse("a variant without a value cannot be sent to another rank");
    auto item = std::visit(
      [&p]<class T>(const T& y) {
        value_path::scope here{p, "alternative"};
        return pack<T>::put(p, y);
      },
      x);
    return value::tuple(
      {value::of(static_cast<int64_t>(x.index())), std::move(item)});
  }

  static std::variant<Ts...> get(unpacker& u,
                                 const value& x) requires(owning<Ts>&&...) {
    auto& items = detail::tuple_items(u, x, 2);
    auto index = pack<int64_t>::get(u, items[0]);
    value_path::scope here{u, "alternative"};
    return get<0>(u, index, items[1]);
  }

private:
  template <size_t I>
  static std::variant<Ts...> get(unpacker& u, int64_t index, const value& x) {
    if constexpr (I == sizeof...(Ts)) {
      u.fail("there is none with the number " + std::to_string(index));
    } else {
      if (index != static_cast<int64_t>(I))
        return get<I + 1>(u, index, x);
      using type = std::variant_alternative_t<I, std::variant<Ts...>>;
      return std::variant<Ts...>{std::in_place_index<I>, pack<type>::get(u, x)};
    }
  }
};

} // namespace smp
