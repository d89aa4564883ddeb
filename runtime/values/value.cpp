#include "runtime/values/value.hpp"

#include <algorithm>
#include <bit>

namespace smp {

namespace {

template <value_kind K, class T>
constexpr bool stands_at = std::is_same_v<
  std::variant_alternative_t<static_cast<size_t>(K), value::variant_type>, T>;

// The kinds go over the wire, so their numbers must be those of the variant.
static_assert(stands_at<value_kind::none, std::monostate>);
static_assert(stands_at<value_kind::boolean, bool>);
static_assert(stands_at<value_kind::integer, int64_t>);
static_assert(stands_at<value_kind::real, double>);
static_assert(stands_at<value_kind::complex, std::complex<double>>);
static_assert(stands_at<value_kind::string, std::string>);
static_assert(stands_at<value_kind::tensor, tensor_index>);
static_assert(stands_at<value_kind::undefined, undefined_tensor>);
static_assert(stands_at<value_kind::list, list_value>);
static_assert(stands_at<value_kind::tuple, tuple_value>);
static_assert(stands_at<value_kind::dict, dict_value>);
static_assert(stands_at<value_kind::device, device_ref>);
static_assert(stands_at<value_kind::dtype, dtype_value>);
static_assert(stands_at<value_kind::nested, nested_tensor>);

struct same_bits {
  const value& other;

  template <class T>
  bool operator()(const T& x) const {
    return x == std::get<T>(other.data);
  }

  bool operator()(double x) const {
    return equal(x, std::get<double>(other.data));
  }

  bool operator()(const std::complex<double>& x) const {
    auto& y = std::get<std::complex<double>>(other.data);
    return equal(x.real(), y.real()) && equal(x.imag(), y.imag());
  }

  bool operator()(const list_value& x) const {
    auto& y = std::get<list_value>(other.data);
    return x.type == y.type && x.items == y.items;
  }

  bool operator()(const tuple_value& x) const {
    return x.items == std::get<tuple_value>(other.data).items;
  }

  bool operator()(const dict_value& x) const {
    auto& y = std::get<dict_value>(other.data);
    return x.type == y.type && x.items == y.items;
  }

  static bool equal(double x, double y) {
    return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
  }
};

} // namespace

bool value::operator==(const value& other) const {
  return data.index() == other.data.index()
         && std::visit(same_bits{other}, data);
}

value value::list(std::vector<value> items, std::string type) {
  return {variant_type{list_value{std::move(items), std::move(type)}}};
}

value value::tuple(std::vector<value> items) {
  return {variant_type{tuple_value{std::move(items)}}};
}

value value::dict(std::vector<std::pair<value, value>> items,
                  std::string type) {
  return {variant_type{dict_value{std::move(items), std::move(type)}}};
}

const char* to_string(value_kind x) noexcept {
  switch (x) {
    case value_kind::none:
      return "none";
    case value_kind::boolean:
      return "bool";
    case value_kind::integer:
      return "int";
    case value_kind::real:
      return "float";
    case value_kind::complex:
      return "complex";
    case value_kind::string:
      return "string";
    case value_kind::tensor:
      return "tensor";
    case value_kind::undefined:
      return "undefined tensor";
    case value_kind::list:
      return "list";
    case value_kind::tuple:
      return "tuple";
    case value_kind::dict:
      return "dict";
    case value_kind::device:
      return "device";
    case value_kind::dtype:
      return "dtype";
    case value_kind::nested:
      return "nested tensor";
  }
  return "unknown kind";
}

} // namespace smp
