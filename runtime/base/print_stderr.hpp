#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <utility>

namespace smp {

/// Writes to stderr. `fmt::print` throws where nothing can be written, as to a
/// log on a full disk: whoever is about to say what went wrong would end by
/// that instead, without a word.
/// @returns false if it was not written
template <class... Ts>
bool print_stderr(fmt::format_string<Ts...> format, Ts&&... xs) {
  auto text = fmt::format(format, std::forward<Ts>(xs)...);
  return std::fwrite(text.data(), 1, text.size(), stderr) == text.size();
}

} // namespace smp
