#pragma once

#include "runtime/step/step_result.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp {

namespace detail {

/// The numbers as a one-dimensional tensor: int64 or double.
at::Tensor tensor_of(const std::vector<int64_t>& xs);
at::Tensor tensor_of(const std::vector<double>& xs);

// Combiners of one tensor or number per microbatch. The mean of whole numbers
// may be fractional, and their sum may overflow their type.

struct mean_of {
  at::Tensor operator()(const std::vector<at::Tensor>& xs) const;

  double operator()(const std::vector<int64_t>& xs) const;
  double operator()(const std::vector<double>& xs) const;
};

struct sum_of {
  at::Tensor operator()(const std::vector<at::Tensor>& xs) const;

  int64_t operator()(const std::vector<int64_t>& xs) const;
  double operator()(const std::vector<double>& xs) const;
};

/// Numbers become a tensor, as scalar tensors do.
struct concat_of {
  at::Tensor operator()(const std::vector<at::Tensor>& xs) const;

  template <class T>
  at::Tensor operator()(const std::vector<T>& xs) const {
    return tensor_of(xs);
  }

  int64_t axis = 0;
};

struct stack_of {
  at::Tensor operator()(const std::vector<at::Tensor>& xs) const;

  template <class T>
  at::Tensor operator()(const std::vector<T>& xs) const {
    return tensor_of(xs);
  }
};

/// Combines results of the same structure, element by element: tensors and
/// numbers.
template <class T>
struct combine {
  static_assert(std::is_arithmetic_v<T>,
                "microbatches of this type have no mean, sum or sequence: "
                "take them one by one from step_output::outputs()");

  template <class F>
  static auto apply(const std::vector<T>& xs, const F& f) {
    using wide = std::conditional_t<std::is_floating_point_v<T>, double,
                                    int64_t>;
    return f(std::vector<wide>(xs.begin(), xs.end()));
  }
};

template <>
struct combine<at::Tensor> {
  template <class F>
  static auto apply(const std::vector<at::Tensor>& xs, const F& f) {
    return f(xs);
  }
};

template <class T, class F>
using combined = decltype(combine<T>::apply(
  std::declval<const std::vector<T>&>(), std::declval<const F&>()));

template <class T>
struct combine<std::vector<T>> {
  template <class F>
  static auto apply(const std::vector<std::vector<T>>& xs, const F& f) {
    std::vector<combined<T, F>> result;
    for (size_t i = 0; i < xs.front().size(); ++i) {
      std::vector<T> column;
      for (auto& x : xs)
        column.push_back(x.at(i));
      result.push_back(combine<T>::apply(column, f));
    }
    return result;
  }
};

template <class T, size_t N>
struct combine<std::array<T, N>> {
  template <class F>
  static auto apply(const std::vector<std::array<T, N>>& xs, const F& f) {
    std::array<combined<T, F>, N> result;
    for (size_t i = 0; i < N; ++i) {
      std::vector<T> column;
      for (auto& x : xs)
        column.push_back(x[i]);
      result[i] = combine<T>::apply(column, f);
    }
    return result;
  }
};

/// @param result receives, for each key of the first one, what all combine to
template <class Map, class Result, class F>
void combine_maps(const std::vector<Map>& xs, Result& result, const F& f) {
  using type = typename Map::mapped_type;
  for (auto& [key, first] : xs.front()) {
    std::vector<type> column;
    for (auto& x : xs)
      column.push_back(x.at(key));
    result.emplace(key, combine<type>::apply(column, f));
  }
}

template <class K, class T>
struct combine<std::map<K, T>> {
  template <class F>
  static auto apply(const std::vector<std::map<K, T>>& xs, const F& f) {
    std::map<K, combined<T, F>> result;
    combine_maps(xs, result, f);
    return result;
  }
};

template <class K, class T>
struct combine<std::unordered_map<K, T>> {
  template <class F>
  static auto apply(const std::vector<std::unordered_map<K, T>>& xs,
                    const F& f) {
    std::unordered_map<K, combined<T, F>> result;
    combine_maps(xs, result, f);
    return result;
  }
};

/// @throws error (user_code) telling that only some microbatches have a value
[[noreturn]] void refuse_to_combine();

/// A value if all microbatches have one, nothing if none has.
template <class T>
struct combine<std::optional<T>> {
  template <class F>
  static auto apply(const std::vector<std::optional<T>>& xs, const F& f) {
    std::optional<combined<T, F>> result;
    std::vector<T> column;
    for (auto& x : xs)
      if (x)
        column.push_back(*x);
    if (column.size() == xs.size())
      result = combine<T>::apply(column, f);
    else if (!column.empty())
      refuse_to_combine();
    return result;
  }
};

template <class... Ts>
struct combine<std::tuple<Ts...>> {
  using tuple = std::tuple<Ts...>;

  template <class F>
  static auto apply(const std::vector<tuple>& xs, const F& f) {
    return apply(xs, f, std::index_sequence_for<Ts...>{});
  }

  template <class F, size_t... Is>
  static std::tuple<combined<Ts, F>...>
  apply(const std::vector<tuple>& xs, const F& f, std::index_sequence<Is...>) {
    return {at<Is>(xs, f)...};
  }

  template <size_t I, class F>
  static auto at(const std::vector<tuple>& xs, const F& f) {
    std::vector<std::tuple_element_t<I, tuple>> column;
    for (auto& x : xs)
      column.push_back(std::get<I>(x));
    return combine<std::tuple_element_t<I, tuple>>::apply(column, f);
  }
};

template <class A, class B>
struct combine<std::pair<A, B>> {
  template <class F>
  static std::pair<combined<A, F>, combined<B, F>>
  apply(const std::vector<std::pair<A, B>>& xs, const F& f) {
    std::vector<A> firsts;
    std::vector<B> seconds;
    for (auto& [a, b] : xs) {
      firsts.push_back(a);
      seconds.push_back(b);
    }
    return {combine<A>::apply(firsts, f), combine<B>::apply(seconds, f)};
  }
};

} // namespace detail

/// The results of a step's microbatches, the same on every rank of the pipeline
/// group. T is the result of the step body: a tensor or a number, or tuples,
/// pairs, vectors, arrays, maps, unordered maps and optionals of these.
/// Detached from the graph, unless `step_options::detach_outputs` is false.
///
/// The combining functions return a T, with each number converted as the
/// function says.
template <class T>
class step_output {
public:
  explicit step_output(std::vector<std::shared_ptr<step_result>> xs)
    : results_(std::move(xs)) {
    // nop
  }

  /// The values by microbatch. Values above 64 KB are fetched from pp_rank 0 at
  /// the first call.
  const std::vector<T>& outputs() const {
    if (!values_) {
      values_.emplace();
      for (auto& x : results_)
        values_->push_back(x->template get<T>());
    }
    return *values_;
  }

  /// Mean over microbatches. A number becomes a double.
  auto reduce_mean() const {
    return detail::combine<T>::apply(outputs(), detail::mean_of{});
  }

  /// Sum over microbatches. A number becomes a double or an int64_t; for bools,
  /// the number of true values.
  auto reduce_sum() const {
    return detail::combine<T>::apply(outputs(), detail::sum_of{});
  }

  /// Concatenates along `axis`; with 0 this restores the order of the batch.
  /// Scalars and numbers become a vector of size `microbatches`.
  auto concat(int64_t axis = 0) const {
    return detail::combine<T>::apply(outputs(), detail::concat_of{axis});
  }

  /// Stacks along a new axis 0 of size `microbatches`.
  auto stack() const {
    return detail::combine<T>::apply(outputs(), detail::stack_of{});
  }

private:
  std::vector<std::shared_ptr<step_result>> results_;
  mutable std::optional<std::vector<T>> values_;
};

/// A step body without a result.
template <>
class step_output<void> {};

} // namespace smp
