// ctest: seconds=90 label=proof alone

#include "tests/support/catch.hpp"

#include "tests/support/random_faults.hpp"

#include <csignal>

using namespace smp::test;

TEST_CASE("fifty runs whose rank is killed end with its name",
          "[apps][faults]") {
  auto seed = GENERATE(range(1001u, 1051u));
  CAPTURE(seed);
  random_fault{seed, SIGKILL}.run();
}

TEST_CASE("fifty runs whose rank is stopped end as a stall",
          "[apps][faults][R7]") {
  auto seed = GENERATE(range(2001u, 2051u));
  CAPTURE(seed);
  random_fault{seed, SIGSTOP}.run();
}
