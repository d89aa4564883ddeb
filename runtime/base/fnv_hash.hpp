#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace smp {

/// FNV-1a (Fowler, Noll, Vo): the same on every rank and in every build, which
/// `std::hash` does not promise.
class fnv_hash {
public:
  /// Adds the characters and a terminator.
  void add(std::string_view x) {
    add_open(x);
    add_byte(0);
  }

  /// Adds the characters only: two calls equal one with the concatenation.
  void add_open(std::string_view x) {
    for (auto c : x)
      add_byte(static_cast<uint8_t>(c));
  }

  void add(uint64_t x) {
    for (int i = 0; i < 8; ++i)
      add_byte(static_cast<uint8_t>(x >> (8 * i)));
  }

  uint64_t get() const {
    return hash_;
  }

private:
  void add_byte(uint8_t x) {
    hash_ = (hash_ ^ x) * 1099511628211ull;
  }

  uint64_t hash_ = 14695981039346656037ull;
};

/// The same idea for large buffers: takes eight bytes at a time, where FNV-1a
/// takes one, and mixes each word into all bits.
inline uint64_t hash_of_memory(std::span<const std::byte> xs) {
  uint64_t result = 14695981039346656037ull;
  for (size_t i = 0; i < xs.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, xs.data() + i, std::min(sizeof(word), xs.size() - i));
    result = (result ^ word) * 0x9e3779b97f4a7c15ull;
    result ^= result >> 29;
  }
  return result;
}

} // namespace smp
