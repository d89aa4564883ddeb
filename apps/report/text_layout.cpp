#include "apps/report/text_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace smp::app {

namespace {

/// @returns the number of bytes of the character at the front of `x`; 0 if
/// that is none.
size_t character_size(std::string_view x) {
  const auto byte = [&x](size_t i) { return static_cast<uint8_t>(x[i]); };
  const auto first = byte(0);
  if (first < 0x80)
    return first == '\n' || (first >= 0x20 && first != 0x7f) ? 1 : 0;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || x.size() < size)
    return 0;
  for (size_t i = 1; i < size; ++i)
    if ((byte(i) & 0xc0) != 0x80)
      return 0;
  // Overlong forms, surrogates, beyond U+10FFFF; 0x80 to 0x9f are controls.
  const auto second = byte(1);
  const bool bad = (first == 0xc2 && second < 0xa0)
                   || (first == 0xe0 && second < 0xa0)
                   || (first == 0xed && second >= 0xa0)
                   || (first == 0xf0 && second < 0x90)
                   || (first == 0xf4 && second >= 0x90);
  return bad ? 0 : size;
}

} // namespace

std::string with_commas(uint64_t x) {
  const auto digits = std::to_string(x);
  std::string result;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0)
      result += ',';
    result += digits[i];
  }
  return result;
}

std::string duration_text(double seconds) {
  if (seconds < 9.995)
    return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<uint64_t>(seconds + 0.5);
  if (whole < 60)
    return fmt::format("{} s", whole);
  if (whole < 3600)
    return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
}

std::string rate_text(double per_second) {
  return fmt::format("{:.{}f}", per_second,
                     per_second < 0.9995  ? 3
                     : per_second < 9.995 ? 2
                     : per_second < 99.95 ? 1
                                          : 0);
}

double plain_number(double x) {
  return std::isnan(x) ? std::abs(x) : x;
}

std::string bytes_text(uint64_t x) {
  constexpr std::array units{"kB", "MB", "GB", "TB", "PB", "EB"};
  if (x < 1000)
    return fmt::format("{} B", x);
  auto value = static_cast<double>(x) / 1000;
  size_t i = 0;
  for (; value >= 999.5 && i + 1 < units.size(); ++i)
    value /= 1000;
  return fmt::format("{:.{}f} {}", value,
                     value < 10    ? 2
                     : value < 100 ? 1
                                   : 0,
                     units[i]);
}

std::string in_capitals(std::string x) {
  for (auto& c : x)
    if (c >= 'a' && c <= 'z')
      c = static_cast<char>(c - 'a' + 'A');
  return x;
}

std::string printable(std::string_view bytes) {
  std::string result;
  while (!bytes.empty()) {
    const auto n = character_size(bytes);
    if (n == 0)
      result += "\xef\xbf\xbd";
    else
      result += bytes.substr(0, n);
    bytes.remove_prefix(std::max<size_t>(n, 1));
  }
  return result;
}

} // namespace smp::app
