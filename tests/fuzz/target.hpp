#pragma once

// Gives one parser hostile bytes: as a Catch2 case from a fixed seed, or, with
// SMP_LIBFUZZER, as the target of a libFuzzer program.

#include <cstddef>
#include <span>
#include <vector>

namespace smp::test {

using fuzz_bytes = std::vector<std::byte>;

struct fuzz_target {
  /// The file's, without "_test.cpp".
  const char* name;
  /// What correct ranks send.
  std::vector<fuzz_bytes> (*seeds)();
  /// Reads them. What it throws is a defect, so it catches how its parser
  /// refuses.
  /// @returns whether they were accepted
  bool (*accepts)(std::span<const std::byte>);
  /// Damaged inputs in a ctest, which is to take seconds.
  int inputs = 200'000;
};

} // namespace smp::test

#ifdef SMP_LIBFUZZER
#  include "tests/fuzz/libfuzzer.hpp"
#  define SMP_FUZZ_TARGET(TEXT, X)                                             \
    extern "C" int LLVMFuzzerInitialize(int*, char***) {                       \
      return smp::test::write_seeds(X);                                        \
    }                                                                          \
    extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  \
      return smp::test::read_one(X, data, size);                               \
    }
#else
#  include "tests/fuzz/seeded.hpp"
#  define SMP_FUZZ_TARGET(TEXT, X)                                             \
    TEST_CASE(TEXT, "[fuzz]") {                                                \
      smp::test::read_damaged(X);                                              \
    }
#endif
