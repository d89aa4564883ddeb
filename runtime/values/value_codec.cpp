#include "runtime/values/value_codec.hpp"

#include "transport/error.hpp"

#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <utility>

namespace smp {

namespace {

/// Numbers travel in little endian whatever the machine has.
template <std::unsigned_integral T>
T little(T x) noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    return x;
  } else {
    T result = 0;
    for (size_t i = 0; i < sizeof(T); ++i, x = static_cast<T>(x >> 8))
      result = static_cast<T>((result << 8) | (x & 0xff));
    return result;
  }
}

template <std::unsigned_integral T>
void append(std::vector<std::byte>& buf, T x) {
  x = little(x);
  auto pos = buf.size();
  buf.resize(pos + sizeof(T));
  std::memcpy(buf.data() + pos, &x, sizeof(T));
}

uint32_t length(size_t x) {
  if (x > std::numeric_limits<uint32_t>::max())
    throw error(error_code::unsupported,
                "a string or list in a message has " + std::to_string(x)
                  + " items, more than 32 bits can count");
  return static_cast<uint32_t>(x);
}

} // namespace

// -- writing ------------------------------------------------------------------

void byte_writer::u8(uint8_t x) {
  buf_.push_back(std::byte{x});
}

void byte_writer::u16(uint16_t x) {
  append(buf_, x);
}

void byte_writer::u32(uint32_t x) {
  append(buf_, x);
}

void byte_writer::u64(uint64_t x) {
  append(buf_, x);
}

void byte_writer::i64(int64_t x) {
  append(buf_, static_cast<uint64_t>(x));
}

void byte_writer::f64(double x) {
  append(buf_, std::bit_cast<uint64_t>(x));
}

void byte_writer::boolean(bool x) {
  u8(x ? 1 : 0);
}

void byte_writer::string(std::string_view x) {
  u32(length(x.size()));
  raw(std::as_bytes(std::span{x}));
}

void byte_writer::bytes(std::span<const std::byte> x) {
  u32(length(x.size()));
  raw(x);
}

void byte_writer::raw(std::span<const std::byte> x) {
  buf_.insert(buf_.end(), x.begin(), x.end());
}

std::vector<std::byte> byte_writer::take() {
  return std::exchange(buf_, {});
}

// -- reading ------------------------------------------------------------------

template <class T>
T byte_reader::number(const char* field) {
  T result;
  std::memcpy(&result, raw(sizeof(T), field).data(), sizeof(T));
  return little(result);
}

uint8_t byte_reader::u8(const char* field) {
  return number<uint8_t>(field);
}

uint16_t byte_reader::u16(const char* field) {
  return number<uint16_t>(field);
}

uint32_t byte_reader::u32(const char* field) {
  return number<uint32_t>(field);
}

uint64_t byte_reader::u64(const char* field) {
  return number<uint64_t>(field);
}

int64_t byte_reader::i64(const char* field) {
  return static_cast<int64_t>(number<uint64_t>(field));
}

double byte_reader::f64(const char* field) {
  return std::bit_cast<double>(number<uint64_t>(field));
}

bool byte_reader::boolean(const char* field) {
  if (remaining() > 0 && std::to_integer<uint8_t>(xs_[pos_]) > 1)
    fail(field, "neither 0 nor 1");
  return u8(field) == 1;
}

std::string byte_reader::string(const char* field) {
  auto chars = raw(count(1, field), field);
  return {reinterpret_cast<const char*>(chars.data()), chars.size()};
}

std::vector<std::byte> byte_reader::bytes(const char* field) {
  auto xs = raw(count(1, field), field);
  return {xs.begin(), xs.end()};
}

std::span<const std::byte> byte_reader::raw(size_t size, const char* field) {
  if (size > remaining())
    fail(field, std::to_string(size) + " bytes wanted, "
                  + std::to_string(remaining()) + " left");
  auto result = xs_.subspan(pos_, size);
  pos_ += size;
  return result;
}

uint32_t byte_reader::count(size_t min_item_size, const char* field) {
  auto result = u32(field);
  if (result > remaining() / min_item_size)
    fail(field, "claims " + std::to_string(result) + " items, but only "
                  + std::to_string(remaining()) + " bytes are left");
  return result;
}

void byte_reader::expect_end() const {
  if (remaining() > 0)
    fail("end of message", std::to_string(remaining()) + " bytes too many");
}

void byte_reader::fail(const char* field, const std::string& why) const {
  throw error(error_code::protocol, std::string{field} + " at byte "
                                      + std::to_string(pos_) + ": " + why);
}

// -- values -------------------------------------------------------------------
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
    out_.u8(x.type);
    out_.u16(static_cast<uint16_t>(x.index));
  }

  void operator()(dtype_value x) {
    out_.u8(x.code);
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
    out_.u32(length(size));
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
      case value_kind::device: {
        auto type = in_.u8("device");
        return value::of(
          device_ref{type, static_cast<int16_t>(in_.u16("device"))});
      }
      case value_kind::dtype:
        return value::of(dtype_value{in_.u8("dtype")});
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

void write(byte_writer& out, const value& x) {
  value_writer{out}.put(x);
}

value read_value(byte_reader& in) {
  return value_parser{in}.get();
}

} // namespace smp
