#include "tests/support/catch.hpp"

#include "runtime/process/cores.hpp"

#include <cstdint>
#include <thread>
#include <vector>

#include <sched.h>

using namespace smp;

namespace {

using cores = std::vector<uint32_t>;

} // namespace

TEST_CASE("cores from which a process is kept do not count",
          "[runtime][cores]") {
  auto all = usable_cores();
  REQUIRE_FALSE(all.empty());
  int refused = -1;
  cores seen;
  std::thread bound{[&] {
    cpu_set_t last;
    CPU_ZERO(&last);
    CPU_SET(all.back(), &last);
    refused = sched_setaffinity(0, sizeof(last), &last);
    seen = usable_cores();
  }};
  bound.join();
  REQUIRE(refused == 0);
  CHECK(seen == cores{all.back()});
  CHECK(usable_cores() == all);
}

TEST_CASE("ranks divide the cores that they share, and no others",
          "[runtime][cores]") {
  // As srun --cpus-per-task=2 or mpirun leaves them: each has its own.
  CHECK(share_of_cores({0, 1}, {{0, 1}, {2, 3}, {4, 5}}) == 2);
  CHECK(share_of_cores({4}, {{4}, {5}}) == 1);
  // As in a job that has four cores of a larger machine.
  CHECK(share_of_cores({8, 9, 10, 11}, {{8, 9, 10, 11}, {8, 9, 10, 11}}) == 2);
  CHECK(share_of_cores({8, 9, 10}, {{8, 9, 10}, {8, 9, 10}}) == 1);
  CHECK(share_of_cores({8, 9, 10}, {{8, 9, 10}}) == 3);
  // More ranks than cores.
  CHECK(share_of_cores({0}, {{0}, {0}, {0}}) == 1);
  // Of six cores two each, but one rank is kept from five.
  CHECK(share_of_cores({0}, {{0}, {0, 1, 2, 3, 4, 5}, {4, 5}}) == 1);
  CHECK(share_of_cores({0, 1, 2, 3, 4, 5}, {{0}, {0, 1, 2, 3, 4, 5}, {4, 5}})
        == 2);
}
