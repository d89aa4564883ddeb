#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <utility>

namespace smp {

/// Writes to stderr. `fmt::print` throws if stderr cannot be written, as with a
/// log on a full disk: a caller that is about to report an error would end with
/// that exception instead, without a message.
/// @returns false if it was not written
template <class... Ts>
bool print_stderr(fmt::format_string<Ts...> format, Ts&&... xs) {
  auto text = fmt::format(format, std::forward<Ts>(xs)...);
  return std::fwrite(text.data(), 1, text.size(), stderr) == text.size();
}

} // namespace smp
