#pragma once

#include "transport/files/run_secret.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <string>

namespace smp::app {

/// @returns 16 random bytes in hexadecimal digits, which nobody can guess
inline std::string random_text() {
  std::array<std::byte, 16> bytes;
  fill_with_random_bytes(bytes);
  std::string result;
  for (auto x : bytes)
    result += fmt::format("{:02x}", std::to_integer<unsigned>(x));
  return result;
}

} // namespace smp::app
