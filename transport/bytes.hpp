#pragma once

// Bytes from another rank may be anything. So everything that crosses ranks is
// written and read here: little endian, no padding, every length and every
// enumeration checked, errors with the name and the place of the field.
//
// A type is encoded field by field, in the order of its `inspect`
// (transport/inspect.hpp):
//
//   bool, integers, enumerations, floating point: their bytes; enumerations one
//   string, vector, set: count u32, then the items
//   optional:            u8 whether there is a value, then the value
//   variant:             u8 index, then the value
//   tensor_ref:          nothing; it is the next tensor of the message

#include "transport/inspect.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

// -- fields -------------------------------------------------------------------

namespace detail {

template <class T>
inline constexpr bool is_vector = false;
template <class T, class A>
inline constexpr bool is_vector<std::vector<T, A>> = true;

template <class T>
inline constexpr bool is_array = false;
template <class T, size_t N>
inline constexpr bool is_array<std::array<T, N>> = true;

template <class T>
inline constexpr bool is_set = false;
template <class T>
inline constexpr bool is_set<std::set<T>> = true;

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
inline constexpr bool is_pair = false;
template <class A, class B>
inline constexpr bool is_pair<std::pair<A, B>> = true;

template <class T>
inline constexpr bool is_variant = false;
template <class... Ts>
inline constexpr bool is_variant<std::variant<Ts...>> = true;

/// The least number of bytes that an item takes.
template <class T>
constexpr size_t min_size() {
  if constexpr (std::is_arithmetic_v<T>)
    return sizeof(T);
  else if constexpr (is_vector<T> || std::is_same_v<T, std::string>)
    return sizeof(uint32_t);
  else
    return 1;
}

template <size_t Size>
struct unsigned_of;
template <>
struct unsigned_of<1> : std::type_identity<uint8_t> {};
template <>
struct unsigned_of<2> : std::type_identity<uint16_t> {};
template <>
struct unsigned_of<4> : std::type_identity<uint32_t> {};
template <>
struct unsigned_of<8> : std::type_identity<uint64_t> {};

/// The unsigned integer that encodes an `x` of type T.
template <class T>
using number_of = typename unsigned_of<sizeof(T)>::type;

template <class F, class T>
struct field {
  const char* name;
  T& x;
  bool operator()(F& f) const {
    f.item(name, x);
    return true;
  }
};

template <class F, class Get, class Set>
struct property {
  const char* name;
  Get get;
  Set set;
  bool operator()(F& f) {
    f.item(name, get, set);
    return true;
  }
};

template <class F>
struct object {
  F& f;
  template <class... Fields>
  bool fields(Fields&&... xs) {
    return (xs(f) && ...);
  }
};

/// What `inspect` needs from a codec F, which has an `item` for each kind of
/// field.
template <class F>
class inspector {
public:
  template <class T>
  auto object(T&) {
    return detail::object<F>{self()};
  }

  template <class T>
  auto field(const char* name, T& x) {
    return detail::field<F, T>{name, x};
  }

  /// @param set takes the value that was read and returns whether it is valid
  template <class Get, class Set>
  auto field(const char* name, Get get, Set set) {
    return detail::property<F, Get, Set>{name, std::move(get), std::move(set)};
  }

  template <class T>
  bool apply(T& x) {
    self().item("", x);
    return true;
  }

private:
  F& self() noexcept {
    return static_cast<F&>(*this);
  }
};

} // namespace detail

// -- writing ------------------------------------------------------------------

/// Appends numbers, strings, bytes and all types that have an `inspect` to a
/// growing buffer.
class byte_writer : public detail::inspector<byte_writer> {
public:
  static constexpr bool is_loading = false;

  byte_writer() = default;

  /// @param tensors of the message; written tensors are appended
  explicit byte_writer(std::vector<tensor_ref>& tensors) : tensors_(&tensors) {
    // nop
  }

  void u8(uint8_t x);
  void u16(uint16_t x);
  void u32(uint32_t x);
  void u64(uint64_t x);
  void i64(int64_t x);
  void f64(double x);
  void boolean(bool x);

  /// Number of items that follow. @throws error above 32 bits
  void count(size_t x);

  /// Length (u32), then the characters. @throws error above 4 GB
  void string(std::string_view x);

  /// Length (u32), then the bytes. @throws error above 4 GB
  void bytes(std::span<const std::byte> x);

  /// The bytes alone: the reader must know how many.
  void raw(std::span<const std::byte> x);

  /// @throws error (internal) if the writer has no list of tensors
  void tensor(tensor_ref x);

  template <class T>
  void put(const T& x) {
    // `inspect` takes mutable references for readers; a writer changes nothing.
    item("", const_cast<T&>(x));
  }

  void reserve(size_t size) {
    buf_.reserve(size);
  }

  size_t size() const noexcept {
    return buf_.size();
  }

  /// @returns what was written; the writer is empty again.
  std::vector<std::byte> take();

  // -- for `inspect` ----------------------------------------------------------

  template <class T>
  void item(const char* name, T& x);

  template <class Get, class Set>
  void item(const char*, Get& get, Set&) {
    put(get());
  }

private:
  std::vector<std::byte> buf_;
  std::vector<tensor_ref>* tensors_ = nullptr;
};

template <class T>
void byte_writer::item(const char* name, T& x) {
  if constexpr (std::is_same_v<T, bool>) {
    boolean(x);
  } else if constexpr (ranged_enum<T>) {
    u8(static_cast<uint8_t>(x));
  } else if constexpr (std::is_arithmetic_v<T>) {
    auto number = std::bit_cast<detail::number_of<T>>(x);
    if constexpr (sizeof(T) == 1)
      u8(number);
    else if constexpr (sizeof(T) == 2)
      u16(number);
    else if constexpr (sizeof(T) == 4)
      u32(number);
    else
      u64(number);
  } else if constexpr (std::is_same_v<T, std::string>) {
    string(x);
  } else if constexpr (std::is_same_v<T, std::vector<std::byte>>) {
    bytes(x);
  } else if constexpr (detail::is_vector<T>) {
    count(x.size());
    for (typename T::const_reference y : x)
      put(y);
  } else if constexpr (detail::is_set<T>) {
    count(x.size());
    for (auto& y : x)
      put(y);
  } else if constexpr (detail::is_array<T>) {
    for (auto& y : x)
      item(name, y);
  } else if constexpr (detail::is_optional<T>) {
    boolean(x.has_value());
    if (x)
      item(name, *x);
  } else if constexpr (detail::is_pair<T>) {
    item(name, x.first);
    item(name, x.second);
  } else if constexpr (detail::is_variant<T>) {
    u8(static_cast<uint8_t>(x.index()));
    std::visit([&](auto& y) { item(name, y); }, x);
  } else if constexpr (std::is_same_v<T, tensor_ref>) {
    tensor(x);
  } else {
    inspect(*this, x);
  }
}

// -- reading ------------------------------------------------------------------

/// Reads what a `byte_writer` wrote. Does not own the bytes.
/// Every read takes the name of the field, for the error that it throws if the
/// bytes cannot be what they should be:
/// `error(protocol, "malformed request: id.number at byte 12: 8 bytes wanted,
/// 3 left")`.
class byte_reader : public detail::inspector<byte_reader> {
public:
  static constexpr bool is_loading = true;

  /// @param what description for errors; outlives the reader
  /// @param tensors of the message
  explicit byte_reader(std::span<const std::byte> xs, const char* what = "",
                       std::span<const tensor_ref> tensors = {})
    : xs_(xs), tensors_(tensors), what_(what) {
    // nop
  }

  byte_reader(const byte_reader&) = delete;
  byte_reader& operator=(const byte_reader&) = delete;

  uint8_t u8(const char* field = "u8");
  uint16_t u16(const char* field = "u16");
  uint32_t u32(const char* field = "u32");
  uint64_t u64(const char* field = "u64");
  int64_t i64(const char* field = "i64");
  double f64(const char* field = "f64");

  /// Only the bytes 0 and 1 are booleans.
  bool boolean(const char* field = "bool");

  std::string string(const char* field = "string");

  std::vector<std::byte> bytes(const char* field = "bytes");

  /// @returns a view of the next `size` bytes.
  std::span<const std::byte> raw(size_t size, const char* field = "raw bytes");

  /// Reads a u32 that counts items of at least `min_item_size` bytes each, and
  /// rejects a count that the remaining bytes cannot hold: safe to reserve.
  /// @pre min_item_size > 0
  uint32_t count(size_t min_item_size, const char* field = "count");

  /// @returns the next tensor of the message.
  const tensor_ref& tensor(const char* field = "tensor");

  template <class T>
  T get(const char* field = "") {
    T result{};
    item(field, result);
    return result;
  }

  /// Bytes read so far.
  size_t position() const noexcept {
    return pos_;
  }

  size_t remaining() const noexcept {
    return xs_.size() - pos_;
  }

  /// @throws error if bytes or tensors are left
  void expect_end() const;

  /// @throws error (protocol) "malformed WHAT: FIELD at byte N: WHY"
  [[noreturn]] void fail(const char* field, const std::string& why) const;

  /// While it lives, names the object that the next fields belong to.
  class scope {
  public:
    scope(byte_reader& in, const char* name)
      : in_(in), name_(name), outer_(in.scope_) {
      in.scope_ = this;
    }

    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;

    ~scope() {
      in_.scope_ = outer_;
    }

  private:
    friend class byte_reader;

    byte_reader& in_;
    const char* name_;
    const scope* outer_;
  };

  // -- for `inspect` ----------------------------------------------------------

  template <class T>
  void item(const char* name, T& x);

  template <class Get, class Set>
  void item(const char* name, Get& get, Set& set) {
    std::decay_t<decltype(get())> x{};
    auto start = pos_;
    item(name, x);
    if (set(std::move(x)))
      return;
    pos_ = start;
    fail(name, "no such value");
  }

private:
  template <class T>
  T number(const char* field);

  template <class T>
  void items(const char* name, std::vector<T>& xs);

  template <class... Ts>
  void variant_item(const char* name, std::variant<Ts...>& x);

  /// Reads the number of one of several alternatives, 0 to `last`.
  uint8_t choice(const char* field, uint8_t last);

  std::string path_to(const char* field) const;

  std::span<const std::byte> xs_;
  std::span<const tensor_ref> tensors_;
  const char* what_;
  const scope* scope_ = nullptr;
  size_t pos_ = 0;
};

template <class T>
void byte_reader::items(const char* name, std::vector<T>& xs) {
  if constexpr (std::is_same_v<T, tensor_ref>) {
    auto n = u32(name);
    if (n > tensors_.size())
      fail(name, "claims " + std::to_string(n) + " tensors, but only "
                   + std::to_string(tensors_.size()) + " are left");
    xs.assign(tensors_.begin(), tensors_.begin() + n);
    tensors_ = tensors_.subspan(n);
  } else {
    // Structs take more memory than bytes: let them grow with what is read.
    auto n = count(detail::min_size<T>(), name);
    xs.clear();
    if constexpr (std::is_arithmetic_v<T>)
      xs.reserve(n);
    for (uint32_t i = 0; i < n; ++i)
      xs.push_back(get<T>(name));
  }
}

template <class... Ts>
void byte_reader::variant_item(const char* name, std::variant<Ts...>& x) {
  auto which = choice(name, sizeof...(Ts) - 1);
  uint8_t i = 0;
  ((i++ == which ? void(x = get<Ts>(name)) : void()), ...);
}

template <class T>
void byte_reader::item(const char* name, T& x) {
  if constexpr (std::is_same_v<T, bool>) {
    x = boolean(name);
  } else if constexpr (ranged_enum<T>) {
    x = static_cast<T>(choice(name, static_cast<uint8_t>(last_of(x))));
  } else if constexpr (std::is_arithmetic_v<T>) {
    if constexpr (sizeof(T) == 1)
      x = std::bit_cast<T>(u8(name));
    else if constexpr (sizeof(T) == 2)
      x = std::bit_cast<T>(u16(name));
    else if constexpr (sizeof(T) == 4)
      x = std::bit_cast<T>(u32(name));
    else
      x = std::bit_cast<T>(u64(name));
  } else if constexpr (std::is_same_v<T, std::string>) {
    x = string(name);
  } else if constexpr (std::is_same_v<T, std::vector<std::byte>>) {
    x = bytes(name);
  } else if constexpr (detail::is_vector<T>) {
    items(name, x);
  } else if constexpr (detail::is_set<T>) {
    auto xs = get<std::vector<typename T::value_type>>(name);
    x = {xs.begin(), xs.end()};
  } else if constexpr (detail::is_array<T>) {
    for (auto& y : x)
      item(name, y);
  } else if constexpr (detail::is_optional<T>) {
    x.reset();
    if (boolean(name))
      x = get<typename T::value_type>(name);
  } else if constexpr (detail::is_pair<T>) {
    item(name, x.first);
    item(name, x.second);
  } else if constexpr (detail::is_variant<T>) {
    variant_item(name, x);
  } else if constexpr (std::is_same_v<T, tensor_ref>) {
    x = tensor(name);
  } else {
    scope inner{*this, name};
    inspect(*this, x);
  }
}

// -- whole messages -----------------------------------------------------------

template <class T>
payload to_payload(const T& x) {
  payload result;
  byte_writer out{result.tensors};
  out.put(x);
  result.bytes = out.take();
  return result;
}

/// @param what is read, for errors
/// @throws error (protocol)
template <class T>
T from_payload(const payload& x, const char* what) {
  byte_reader in{x.bytes, what, x.tensors};
  auto result = in.get<T>();
  in.expect_end();
  return result;
}

/// @param from the sender
/// @throws error (protocol) naming `from`
template <class T>
T from_payload(const payload& x, const char* what, rank_id from) {
  try {
    return from_payload<T>(x, what);
  } catch (const error& e) {
    throw error{failure{e.code(), from, {}, e.cause().text}};
  }
}

template <class Inspector>
bool inspect(Inspector& f, payload& x) {
  return f.object(x).fields(f.field("bytes", x.bytes),
                            f.field("tensors", x.tensors));
}

} // namespace smp
