#pragma once

#include <algorithm>

namespace smp::test {

/// What an attempt takes that has to stay below a bound. All attempts have to
/// end well, one of them in time, as the machine may be busy.
/// @param f makes an attempt in a world of its own. @returns what it took
/// @returns the least of so many attempts at most
template <class T, class F>
T best_of(int attempts, T bound, F f) {
  T result = f();
  for (int i = 1; i < attempts && result >= bound; ++i)
    result = std::min<T>(result, f());
  return result;
}

} // namespace smp::test
