#pragma once

#include "runtime/session/step_result.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace smp {

namespace detail {

at::Tensor reduce_mean(const std::vector<at::Tensor>& xs);
at::Tensor reduce_sum(const std::vector<at::Tensor>& xs);
at::Tensor concat(const std::vector<at::Tensor>& xs, int64_t axis);
at::Tensor stack(const std::vector<at::Tensor>& xs);

/// Combines results of the same structure, tensor by tensor. Numbers are
/// combined as numbers where that has a meaning; everything else must be a
/// tensor or a container of tensors.
template <class T>
struct combine;

template <>
struct combine<at::Tensor> {
  template <class F>
  static at::Tensor apply(const std::vector<at::Tensor>& xs, F& f) {
    return f(xs);
  }
};

template <class T>
struct combine<std::vector<T>> {
  template <class F>
  static std::vector<T> apply(const std::vector<std::vector<T>>& xs, F& f) {
    std::vector<T> result;
    for (size_t i = 0; i < xs.front().size(); ++i) {
      std::vector<T> column;
      for (auto& x : xs)
        column.push_back(x.at(i));
      result.push_back(combine<T>::apply(column, f));
    }
    return result;
  }
};

template <class K, class T>
struct combine<std::map<K, T>> {
  template <class F>
  static std::map<K, T> apply(const std::vector<std::map<K, T>>& xs, F& f) {
    std::map<K, T> result;
    for (auto& [key, first] : xs.front()) {
      std::vector<T> column;
      for (auto& x : xs)
        column.push_back(x.at(key));
      result.emplace(key, combine<T>::apply(column, f));
    }
    return result;
  }
};

template <class... Ts>
struct combine<std::tuple<Ts...>> {
  using tuple = std::tuple<Ts...>;

  template <class F>
  static tuple apply(const std::vector<tuple>& xs, F& f) {
    return apply(xs, f, std::index_sequence_for<Ts...>{});
  }

  template <class F, size_t... Is>
  static tuple apply(const std::vector<tuple>& xs, F& f,
                     std::index_sequence<Is...>) {
    return {at<Is>(xs, f)...};
  }

  template <size_t I, class F>
  static auto at(const std::vector<tuple>& xs, F& f) {
    std::vector<std::tuple_element_t<I, tuple>> column;
    for (auto& x : xs)
      column.push_back(std::get<I>(x));
    return combine<std::tuple_element_t<I, tuple>>::apply(column, f);
  }
};

template <class A, class B>
struct combine<std::pair<A, B>> {
  template <class F>
  static std::pair<A, B> apply(const std::vector<std::pair<A, B>>& xs, F& f) {
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

/// What the microbatches of a step returned, the same on every rank of the
/// pipeline group. T is what the step body returns: a tensor, or tuples,
/// pairs, vectors and string maps of such. Detached from the graph.
template <class T>
class step_output {
public:
  explicit step_output(std::vector<std::shared_ptr<step_result>> xs)
    : results_(std::move(xs)) {
    // nop
  }

  /// The values by microbatch. Values above 64 KB come from pp_rank 0 when
  /// this is first called.
  const std::vector<T>& outputs() const {
    if (!values_) {
      values_.emplace();
      for (auto& x : results_)
        values_->push_back(x->template get<T>());
    }
    return *values_;
  }

  /// Mean over microbatches.
  T reduce_mean() const {
    auto f = detail::reduce_mean;
    return detail::combine<T>::apply(outputs(), f);
  }

  /// Sum over microbatches.
  T reduce_sum() const {
    auto f = detail::reduce_sum;
    return detail::combine<T>::apply(outputs(), f);
  }

  /// Concatenates along `axis`; with 0 the order of the batch comes back.
  /// Scalars become a vector of size `microbatches`.
  T concat(int64_t axis = 0) const {
    auto f = [axis](const std::vector<at::Tensor>& xs) {
      return detail::concat(xs, axis);
    };
    return detail::combine<T>::apply(outputs(), f);
  }

  /// Stacks along a new axis 0 of size `microbatches`.
  T stack() const {
    auto f = detail::stack;
    return detail::combine<T>::apply(outputs(), f);
  }

private:
  std::vector<std::shared_ptr<step_result>> results_;
  mutable std::optional<std::vector<T>> values_;
};

/// A step body without a result.
template <>
class step_output<void> {};

} // namespace smp
