// ctest: seconds=20 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "tests/support/random_faults.hpp"

#include <csignal>

// A dozen moments for every day; random_faults_test.cpp has more.

using namespace smp::test;

TEST_CASE("a run whose rank is killed at any moment ends with its name",
          "[apps][faults]") {
  run_random_faults(1, 9, SIGKILL);
}

TEST_CASE("a run whose rank is stopped at any moment ends as a stall",
          "[apps][faults][R7]") {
  run_random_faults(101, 105, SIGSTOP);
}
