#pragma once

// The glue between a target and libFuzzer.

#include "tests/fuzz/target.hpp"

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

namespace smp::test {

/// Writes what correct ranks send into the directory that SMP_FUZZ_SEEDS names,
/// for libFuzzer to begin with.
inline int write_seeds(const fuzz_target& x) {
  auto directory = std::getenv("SMP_FUZZ_SEEDS");
  if (directory == nullptr)
    return 0;
  int number = 0;
  for (auto& seed : x.seeds()) {
    if (!x.accepts(seed)) {
      std::cerr << x.name << ": seed " << number << " is refused\n";
      return 1;
    }
    std::ofstream out{std::string{directory} + "/seed-"
                        + std::to_string(number++),
                      std::ios::binary};
    out.write(reinterpret_cast<const char*>(seed.data()),
              static_cast<std::streamsize>(seed.size()));
  }
  return 0;
}

/// An exception ends the program, which libFuzzer reports.
inline int read_one(const fuzz_target& x, const uint8_t* data, size_t size) {
  x.accepts({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}

} // namespace smp::test
