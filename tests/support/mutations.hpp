#pragma once

// Bytes as a damaged or hostile rank might send them.

#include <cstddef>
#include <random>
#include <vector>

namespace smp::test {

/// @returns `x` with one to four bytes changed, added or taken away.
template <class Engine>
std::vector<std::byte> mutated(std::vector<std::byte> x, Engine& engine) {
  for (auto n = 1 + engine() % 4; n > 0 && !x.empty(); --n) {
    auto pos = static_cast<ptrdiff_t>(engine() % x.size());
    switch (engine() % 4) {
      case 0:
        x[static_cast<size_t>(pos)] = static_cast<std::byte>(engine());
        break;
      case 1:
        x[static_cast<size_t>(pos)] ^= static_cast<std::byte>(1u
                                                              << engine() % 8);
        break;
      case 2:
        x.insert(x.begin() + pos, static_cast<std::byte>(engine() % 16));
        break;
      default:
        x.erase(x.begin() + pos);
    }
  }
  return x;
}

} // namespace smp::test
