#pragma once

// Bytes that come from another rank may be anything. Everything that runtime/
// reads from a message goes through this length-checked codec (little endian,
// no padding), which needs no tensor library, so that it can be fuzzed.

#include "runtime/values/value.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// Appends numbers, strings and bytes to a growing buffer.
class byte_writer {
public:
  void u8(uint8_t x);
  void u16(uint16_t x);
  void u32(uint32_t x);
  void u64(uint64_t x);
  void i64(int64_t x);
  void f64(double x);
  void boolean(bool x);

  /// Length (u32), then the characters. @throws error above 4 GB
  void string(std::string_view x);

  /// Length (u32), then the bytes. @throws error above 4 GB
  void bytes(std::span<const std::byte> x);

  /// The bytes alone: the reader must know how many.
  void raw(std::span<const std::byte> x);

  size_t size() const noexcept {
    return buf_.size();
  }

  /// @returns what was written; the writer is empty again.
  std::vector<std::byte> take();

private:
  std::vector<std::byte> buf_;
};

/// Reads what a `byte_writer` wrote. Does not own the bytes.
/// Every read takes the name of the field, for the error that it throws if the
/// bytes cannot be what they should be:
/// `error(protocol, "request id at byte 12: 8 bytes wanted, 3 left")`.
class byte_reader {
public:
  explicit byte_reader(std::span<const std::byte> xs) : xs_(xs) {
    // nop
  }

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
  /// refuses a count that what is left cannot hold: safe to reserve.
  /// @pre min_item_size > 0
  uint32_t count(size_t min_item_size, const char* field = "count");

  /// Bytes read so far.
  size_t position() const noexcept {
    return pos_;
  }

  size_t remaining() const noexcept {
    return xs_.size() - pos_;
  }

  /// @throws error if bytes are left
  void expect_end() const;

  /// @throws error (protocol) "FIELD at byte N: WHY"
  [[noreturn]] void fail(const char* field, const std::string& why) const;

private:
  template <class T>
  T number(const char* field);

  std::span<const std::byte> xs_;
  size_t pos_ = 0;
};

/// Appends `x`. @throws error (unsupported) above `max_value_depth`
void write(byte_writer& out, const value& x);

/// Reads one value. Memory stays proportional to the bytes read, whatever
/// sizes the bytes claim. Accepts exactly what `write` produces.
/// @throws error (protocol)
value read_value(byte_reader& in);

} // namespace smp
