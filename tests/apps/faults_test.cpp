// ctest: seconds=20 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "tests/support/random_faults.hpp"

#include <csignal>

// A dozen moments for every day; random_faults_test.cpp has more.

using namespace smp::test;

TEST_CASE("a run whose rank is killed at any moment ends with its name",
          "[apps][faults]") {
  auto seed = GENERATE(range(1u, 9u));
  CAPTURE(seed);
  random_fault{seed, SIGKILL}.run();
}

TEST_CASE("a run whose rank is stopped at any moment ends as a stall",
          "[apps][faults][R7]") {
  auto seed = GENERATE(range(101u, 105u));
  CAPTURE(seed);
  random_fault{seed, SIGSTOP}.run();
}
