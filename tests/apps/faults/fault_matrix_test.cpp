// ctest: seconds=40 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "tests/support/fault_matrix.hpp"

#include <string>
#include <vector>

// Some of them for every day; whole_fault_matrix_test.cpp has all.

using namespace smp::test;

namespace {

fault_case cell(const std::string& kind, const std::string& phase, int rank,
                int restarts) {
  for (auto& x : fault_matrix())
    if (x.kind == kind && x.phase == phase)
      return {x, rank, restarts};
  FAIL("no cell " << kind << ", " << phase);
  return {};
}

} // namespace

TEST_CASE("a run ends by each kind of fault, with the name of who failed",
          "[apps][faults]") {
  check_faults(
    {cell("kill", "start-up", 1, 0), cell("stop", "backward", 1, 0),
     cell("loop", "forward", 0, 0), cell("actors", "forward", 1, 0),
     cell("abort", "optimizer", 0, 0), cell("throw", "backward", 1, 0),
     cell("memory", "checkpoint", 1, 0), cell("disk", "checkpoint", 1, 0),
     cell("disk", "evaluation", 1, 0)});
}

TEST_CASE("a run goes on after each kind of fault that may pass",
          "[apps][faults][restarts]") {
  check_faults(
    {cell("kill", "checkpoint", 0, 1), cell("stop", "evaluation", 1, 1),
     cell("throw", "forward", 1, 1), cell("throw", "start-up", 1, 1)});
}
