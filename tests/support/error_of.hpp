#pragma once

#include "transport/error.hpp"

#include <concepts>
#include <optional>
#include <string>

namespace smp::test {

// What code throws. These check nothing by themselves: they may be called on
// any thread.

/// @returns the cause of the `error` that `f` throws; empty if it throws none
template <std::invocable F>
failure failure_of(F&& f) {
  try {
    f();
  } catch (const error& x) {
    return x.cause();
  }
  return {};
}

/// @returns `text`, with a word before it if `x` is not of the expected kind;
/// "no error" if there is none
inline std::string text_if_of_kind(const failure& x, const std::string& text,
                                   std::optional<error_code> expected) {
  if (!x)
    return "no error";
  return !expected || x.code == *expected ? text : "of another kind: " + text;
}

/// @returns the text of the `error` that `f` throws, with a word before it if
/// that is not of the expected kind; "no error" if it throws none
template <std::invocable F>
std::string error_of(F&& f, std::optional<error_code> expected = {}) {
  auto x = failure_of(f);
  return text_if_of_kind(x, x.describe(), expected);
}

/// The same without rank and module, which stand before the text.
template <std::invocable F>
std::string cause_of(F&& f, std::optional<error_code> expected = {}) {
  auto x = failure_of(f);
  return text_if_of_kind(x, x.text, expected);
}

} // namespace smp::test
