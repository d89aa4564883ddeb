#pragma once

// The values that ranks exchange, without any tensor library.

#include "transport/tensor_ref.hpp"

#include <complex>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

struct value;

/// Maximum nesting of lists, tuples and dicts: a bound on the stack of code
/// that walks a value.
inline constexpr size_t max_value_depth = 64;

/// Position in the tensor table of the message. Two uses of one tensor have
/// the same position, so that it is sent once and arrives as one.
struct tensor_index {
  uint32_t index = 0;
  bool operator==(const tensor_index&) const = default;
};

/// A tensor object without a tensor in it, e.g. an absent mask.
struct undefined_tensor {
  bool operator==(const undefined_tensor&) const = default;
};

/// A nested tensor: the rows of `sizes` and `strides` [n, d] and `offsets` [n]
/// tell where in `elements` each of its n tensors is.
struct nested_tensor {
  tensor_index elements;
  tensor_index sizes;
  tensor_index strides;
  tensor_index offsets;
  bool operator==(const nested_tensor&) const = default;
};

/// An element type, as the tensor library numbers it.
struct dtype_value {
  uint8_t code = 0;
  bool operator==(const dtype_value&) const = default;
};

struct list_value {
  std::vector<value> items;
  /// What TorchScript calls the list, e.g. "List[int]"; empty in C++ values.
  /// An empty list would lose its element type without it.
  std::string type = {};
};

struct tuple_value {
  std::vector<value> items;
};

/// Keys keep their order and need not be strings.
struct dict_value {
  std::vector<std::pair<value, value>> items;
  /// As in `list_value`: "Dict[str, Tensor]".
  std::string type = {};
};

/// The alternatives of `value`, in their order.
enum class value_kind : uint8_t {
  none,
  boolean,
  integer,
  real,
  complex,
  string,
  tensor,
  undefined,
  list,
  tuple,
  dict,
  device,
  dtype,
  nested,
};

/// The single type of arguments and results between ranks: a tree that
/// copies no tensor and uses no tensor library, so that its codec can be
/// tested on its own.
struct value {
  using variant_type = std::variant<
    std::monostate, bool, int64_t, double, std::complex<double>, std::string,
    tensor_index, undefined_tensor, list_value, tuple_value, dict_value,
    device_ref, dtype_value, nested_tensor>;

  variant_type data;

  value_kind kind() const noexcept {
    return static_cast<value_kind>(data.index());
  }

  template <class T>
  const T* get_if() const noexcept {
    return std::get_if<T>(&data);
  }

  template <class T>
  T* get_if() noexcept {
    return std::get_if<T>(&data);
  }

  /// Same kind and same bits: NaN equals itself, 0.0 differs from -0.0.
  bool operator==(const value& other) const;

  // -- constructors for every kind --------------------------------------------

  static value none() {
    return {};
  }

  static value of(bool x) {
    return {variant_type{std::in_place_type<bool>, x}};
  }

  static value of(int64_t x) {
    return {variant_type{std::in_place_type<int64_t>, x}};
  }

  static value of(double x) {
    return {variant_type{std::in_place_type<double>, x}};
  }

  static value of(std::complex<double> x) {
    return {variant_type{std::in_place_type<std::complex<double>>, x}};
  }

  static value of(std::string x) {
    return {variant_type{std::in_place_type<std::string>, std::move(x)}};
  }

  static value of(std::string_view x) {
    return of(std::string{x});
  }

  static value of(const char* x) {
    return of(std::string{x});
  }

  static value of(device_ref x) {
    return {variant_type{x}};
  }

  static value of(dtype_value x) {
    return {variant_type{x}};
  }

  static value tensor(uint32_t index) {
    return {variant_type{tensor_index{index}}};
  }

  static value of(const nested_tensor& x) {
    return {variant_type{x}};
  }

  static value undefined() {
    return {variant_type{undefined_tensor{}}};
  }

  static value list(std::vector<value> items, std::string type = {});

  static value tuple(std::vector<value> items);

  static value dict(std::vector<std::pair<value, value>> items,
                    std::string type = {});
};

/// @returns the name of `x` in error messages, e.g. "int".
const char* to_string(value_kind x) noexcept;

/// Calls `f(tensor_index&)` for every use of a tensor, in the order of the
/// tree; `Value` is `value` or `const value`.
template <class Value, class F>
void for_each_tensor(Value& x, F&& f) {
  if (auto ptr = x.template get_if<tensor_index>()) {
    f(*ptr);
  } else if (auto ptr = x.template get_if<nested_tensor>()) {
    f(ptr->elements);
    f(ptr->sizes);
    f(ptr->strides);
    f(ptr->offsets);
  } else if (auto ptr = x.template get_if<list_value>()) {
    for (auto& item : ptr->items)
      for_each_tensor(item, f);
  } else if (auto ptr = x.template get_if<tuple_value>()) {
    for (auto& item : ptr->items)
      for_each_tensor(item, f);
  } else if (auto ptr = x.template get_if<dict_value>()) {
    for (auto& [key, item] : ptr->items) {
      for_each_tensor(key, f);
      for_each_tensor(item, f);
    }
  }
}

} // namespace smp
