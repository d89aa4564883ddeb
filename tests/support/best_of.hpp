#pragma once

#include "tests/support/slowness.hpp"

#include <algorithm>
#include <chrono>
#include <type_traits>

namespace smp::test {

/// What an attempt takes that has to stay below a bound. All attempts have to
/// end well, one of them in time. The machine may be busy, so the time of each
/// is divided by how much slower than a quiet one it is meanwhile.
/// @param f makes an attempt in a world of its own. @returns what it took: a
/// duration, or a number of any unit
/// @returns the least of so many attempts at most
template <class T, class F>
T best_of(int attempts, T bound, F f) {
  auto attempt = [&] {
    slowness machine;
    auto took = f() / machine.factor();
    if constexpr (std::is_arithmetic_v<T>)
      return static_cast<T>(took);
    else
      return std::chrono::duration_cast<T>(took);
  };
  T result = attempt();
  for (int i = 1; i < attempts && result >= bound; ++i)
    result = std::min<T>(result, attempt());
  return result;
}

} // namespace smp::test
