// ctest: seconds=300 label=proof alone

#include "tests/support/catch.hpp"

#include "tests/support/fault_matrix.hpp"

#include <vector>

using namespace smp::test;

namespace {

std::vector<fault_case> all_cells(int rank, int restarts) {
  std::vector<fault_case> result;
  for (auto& x : fault_matrix())
    result.push_back({x, rank, restarts});
  return result;
}

} // namespace

TEST_CASE("a run ends by every fault at every place", "[apps][faults]") {
  check_faults(all_cells(1, 0));
}

TEST_CASE("a run goes on after every fault at every place",
          "[apps][faults][restarts]") {
  check_faults(all_cells(0, 1));
}
