#pragma once

// What the `forward` of a class takes and returns, as its type tells.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace smp::detail {

/// True for arguments that a call cannot change for its caller. (Tensors that a
/// call changes have their own way back.)
template <class T>
using stays_as_it_is = std::disjunction<
  std::negation<std::is_lvalue_reference<T>>,
  std::is_const<std::remove_reference_t<T>>,
  std::is_same<std::decay_t<T>, at::Tensor>>;

template <class F>
struct forward_traits;

template <class C, class R, class... Ts>
struct forward_traits<R (C::*)(Ts...)> {
  /// The type with which argument I, given as a T, is passed on.
  template <size_t I, class T>
  using argument = std::tuple_element_t<I, std::tuple<Ts...>>;

  /// Tells whether it can be called through `arguments`: it returns a value,
  /// and cannot change its arguments.
  static constexpr bool translatable = std::conjunction_v<
    std::negation<std::is_void<R>>, std::negation<std::is_reference<R>>,
    stays_as_it_is<Ts>...>;

  using arguments = std::tuple<std::decay_t<Ts>...>;
  using result = std::decay_t<R>;
};

template <class C, class R, class... Ts>
struct forward_traits<R (C::*)(Ts...) const> : forward_traits<R (C::*)(Ts...)> {
};

/// An overloaded or templated `forward` takes what it is given.
struct any_forward_traits {
  template <size_t, class T>
  using argument = std::decay_t<T>;

  static constexpr bool translatable = false;
  using arguments = std::tuple<>;
};

template <class Impl>
auto traits_of_forward() {
  if constexpr (requires { &Impl::forward; })
    return forward_traits<decltype(&Impl::forward)>{};
  else
    return any_forward_traits{};
}

template <class Impl>
using forward_form = decltype(traits_of_forward<Impl>());

// -- tensors and what holds them ----------------------------------------------

/// True for result types that always have the same number of tensors.
template <class R>
inline constexpr bool is_tensors = std::is_same_v<R, at::Tensor>;

template <class... Ts>
inline constexpr bool
  is_tensors<std::tuple<Ts...>> = (std::is_same_v<Ts, at::Tensor> && ...);

template <class A, class B>
inline constexpr bool is_tensors<std::pair<A, B>> = std::is_same_v<
  A, at::Tensor>&& std::is_same_v<B, at::Tensor>;

/// The same, with tuples nested in tuples.
template <class R>
inline constexpr bool nests_tensors = std::is_same_v<R, at::Tensor>;

template <class... Ts>
inline constexpr bool
  nests_tensors<std::tuple<Ts...>> = (nests_tensors<Ts> && ...);

template <class A, class B>
inline constexpr bool nests_tensors<std::pair<A, B>> = nests_tensors<A>&&
  nests_tensors<B>;

/// True for a tensor, a tuple or a vector of them.
template <class R>
inline constexpr bool gives_tensors = std::disjunction_v<
  std::bool_constant<nests_tensors<std::decay_t<R>>>,
  std::is_same<std::decay_t<R>, std::vector<at::Tensor>>>;

/// The same for types of arguments, which may also convert to a tensor.
template <class T>
inline constexpr bool holds_tensors = std::disjunction_v<
  std::is_convertible<T, at::Tensor>, std::bool_constant<gives_tensors<T>>>;

/// True for calls that tensor-parallel ranks may share as they are.
template <class R, class... Ts>
inline constexpr bool is_shareable = std::conjunction_v<
  std::bool_constant<gives_tensors<R>>,
  std::bool_constant<holds_tensors<Ts>>...>;

/// Adds a tensor, or those of a tuple or a vector.
template <class T>
void add_tensors(std::vector<at::Tensor>& to, const T& x) {
  if constexpr (std::is_convertible_v<const T&, at::Tensor>)
    to.push_back(x);
  else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>)
    to.insert(to.end(), x.begin(), x.end());
  else
    std::apply([&](auto&... ys) { (add_tensors(to, ys), ...); }, x);
}

/// @param next position of the next tensor to take
template <class R>
R next_of(const std::vector<at::Tensor>& xs, size_t& next) {
  if constexpr (std::is_same_v<R, at::Tensor>)
    return xs.at(next++);
  else
    return [&]<size_t... Is>(std::index_sequence<Is...>) {
      // Braces evaluate from left to right.
      return R{next_of<std::tuple_element_t<Is, R>>(xs, next)...};
    }
  (std::make_index_sequence<std::tuple_size_v<R>>{});
}

/// @returns an R of the tensors
template <class R>
R from_tensors(const std::vector<at::Tensor>& xs) {
  if constexpr (std::is_same_v<R, std::vector<at::Tensor>>) {
    return xs;
  } else {
    size_t next = 0;
    return next_of<R>(xs, next);
  }
}

} // namespace smp::detail
