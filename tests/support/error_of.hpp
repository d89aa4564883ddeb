#pragma once

#include "transport/error.hpp"

#include <optional>
#include <string>

namespace smp::test {

/// Runs `f`. Checks nothing by itself: may be called on any thread.
/// @returns the text of the `error` that it throws, with a word before it if
/// that is not of the expected kind; "no error" if it throws none
template <class F>
std::string error_of(F&& f, std::optional<error_code> expected = {}) {
  try {
    f();
  } catch (const error& x) {
    if (expected && x.code() != *expected)
      return std::string{"of another kind: "} + x.what();
    return x.what();
  }
  return "no error";
}

} // namespace smp::test
