// ctest: seconds=90 label=proof alone

#include "tests/support/catch.hpp"

#include "tests/support/random_faults.hpp"

#include <csignal>

using namespace smp::test;

TEST_CASE("fifty runs whose rank is killed end with its name",
          "[apps][faults]") {
  run_random_faults(1001, 1051, SIGKILL);
}

TEST_CASE("fifty runs whose rank is stopped end as a stall",
          "[apps][faults][R7]") {
  run_random_faults(2001, 2051, SIGSTOP);
}
