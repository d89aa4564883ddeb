// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/process/cores.hpp"
#include "runtime/session/session.hpp"
#include "tests/support/runs/program.hpp"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <string>

#include <sched.h>

using namespace smp;
using namespace smp::test;

TEST_CASE("a rank that is bound to a core", "[.bound_rank]") {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(usable_cores().front(), &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  session_config config;
  config.threads = std::stoul(std::getenv("WANTED"));
  session s{config};
  CHECK(at::get_num_threads() == std::stoi(std::getenv("THREADS")));
}

TEST_CASE("a rank has no more threads than cores, unless it is told to",
          "[runtime][session]") {
  auto threads = [](const std::string& wanted, const std::string& expected) {
    program{this_program("[.bound_rank]"),
            ".",
            {{"WANTED", wanted}, {"THREADS", expected}}}
      .finish();
  };
  threads("0", "1");
  threads("3", "3");
}
