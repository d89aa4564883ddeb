#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace smp::test {

inline std::vector<std::byte> bytes_of(std::initializer_list<int> xs) {
  std::vector<std::byte> result;
  for (auto x : xs)
    result.push_back(static_cast<std::byte>(x));
  return result;
}

/// As text, because Torch's output operators refuse vectors of bytes.
inline std::string hex(std::span<const std::byte> xs) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string result;
  for (auto x : xs) {
    result += digits[std::to_integer<int>(x) >> 4];
    result += digits[std::to_integer<int>(x) & 15];
  }
  return result;
}

} // namespace smp::test
