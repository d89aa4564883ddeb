#include "runtime/values/value_codec.hpp"

#include <utility>

namespace smp {

// One byte of kind, then what the kind needs.

namespace {

class value_writer {
public:
  explicit value_writer(byte_writer& out) : out_(out) {
    // nop
  }

  void put(const value& x) {
    out_.u8(static_cast<uint8_t>(x.kind()));
    std::visit(*this, x.data);
  }

  void operator()(std::monostate) {
    // nop
  }

  void operator()(bool x) {
    out_.boolean(x);
  }

  void operator()(int64_t x) {
    out_.i64(x);
  }

  void operator()(double x) {
    out_.f64(x);
  }

  void operator()(std::complex<double> x) {
    out_.f64(x.real());
    out_.f64(x.imag());
  }

  void operator()(const std::string& x) {
    out_.string(x);
  }

  void operator()(tensor_index x) {
    out_.u32(x.index);
  }

  void operator()(undefined_tensor) {
    // nop
  }

  void operator()(const list_value& x) {
    out_.string(x.type);
    put_items(x.items);
  }

  void operator()(const tuple_value& x) {
    put_items(x.items);
  }

  void operator()(const dict_value& x) {
    out_.string(x.type);
    open(x.items.size());
    for (auto& [key, item] : x.items) {
      put(key);
      put(item);
    }
    --depth_;
  }

  void operator()(device_ref x) {
    out_.put(x);
  }

  void operator()(dtype_value x) {
    out_.u8(x.code);
  }

  void operator()(const nested_tensor& x) {
    for (auto part : {x.elements, x.sizes, x.strides, x.offsets})
      out_.u32(part.index);
  }

private:
  void put_items(const std::vector<value>& xs) {
    open(xs.size());
    for (auto& x : xs)
      put(x);
    --depth_;
  }

  void open(size_t size) {
    if (++depth_ > max_value_depth)
      throw error(error_code::unsupported,
                  "lists, tuples and dicts are nested more than "
                    + std::to_string(max_value_depth) + " deep");
    out_.count(size);
  }

  byte_writer& out_;
  size_t depth_ = 0;
};

class value_parser {
public:
  explicit value_parser(byte_reader& in)
    : in_(in), unannounced_(in.remaining()) {
    // nop
  }

  value get() {
    auto kind = in_.u8("value kind");
    switch (static_cast<value_kind>(kind)) {
      case value_kind::none:
        return {};
      case value_kind::boolean:
        return value::of(in_.boolean());
      case value_kind::integer:
        return value::of(in_.i64("int"));
      case value_kind::real:
        return value::of(in_.f64("float"));
      case value_kind::complex: {
        auto real = in_.f64("complex");
        return value::of(std::complex<double>{real, in_.f64("complex")});
      }
      case value_kind::string:
        return value::of(in_.string());
      case value_kind::tensor:
        return value::tensor(in_.u32("tensor index"));
      case value_kind::undefined:
        return value::undefined();
      case value_kind::list: {
        auto type = in_.string("list type");
        return value::list(items("list"), std::move(type));
      }
      case value_kind::tuple:
        return value::tuple(items("tuple"));
      case value_kind::dict: {
        auto type = in_.string("dict type");
        return value::dict(entries(), std::move(type));
      }
      case value_kind::device:
        return value::of(in_.get<device_ref>("device"));
      case value_kind::dtype:
        return value::of(dtype_value{in_.u8("dtype")});
      case value_kind::nested: {
        nested_tensor result;
        for (auto* part : {&result.elements, &result.sizes, &result.strides,
                           &result.offsets})
          part->index = in_.u32("tensor index");
        return value::of(result);
      }
    }
    in_.fail("value kind", "unknown kind " + std::to_string(kind));
  }

private:
  std::vector<value> items(const char* field) {
    auto n = open(1, field);
    std::vector<value> result;
    result.reserve(n);
    for (uint32_t i = 0; i < n; ++i)
      result.push_back(get());
    --depth_;
    return result;
  }

  std::vector<std::pair<value, value>> entries() {
    auto n = open(2, "dict");
    std::vector<std::pair<value, value>> result;
    result.reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
      auto key = get();
      result.emplace_back(std::move(key), get());
    }
    --depth_;
    return result;
  }

  /// Each value takes a byte at least, so a message can hold no more values
  /// than bytes. Without this sum, nested lists could each claim all the bytes
  /// that are left, and memory would grow with the depth.
  uint32_t open(size_t values_per_item, const char* field) {
    if (++depth_ > max_value_depth)
      in_.fail(field,
               "nested more than " + std::to_string(max_value_depth) + " deep");
    auto result = in_.count(values_per_item, field);
    auto announced = result * values_per_item;
    if (announced > unannounced_)
      in_.fail(field, "claims more items than the message has bytes");
    unannounced_ -= announced;
    return result;
  }

  byte_reader& in_;
  size_t unannounced_;
  size_t depth_ = 0;
};

} // namespace

bool inspect(byte_writer& out, value& x) {
  value_writer{out}.put(x);
  return true;
}

bool inspect(byte_reader& in, value& x) {
  x = value_parser{in}.get();
  return true;
}

} // namespace smp
