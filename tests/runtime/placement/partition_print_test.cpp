// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/launcher.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <cstdlib>
#include <string>

using namespace smp;
using namespace smp::test;

TEST_CASE("a rank that partitions", "[.partition_print_rank]") {
  auto config = manual_world().config;
  if (std::string{std::getenv("PRINTS")} != "default")
    config.print_partition = false;
  session s{config};
  auto unused = [](auto&, Tensor x) { return x; };
  auto made = caller{unused, unused};
  made->there->smp_hook.pinned = 0; // nothing is left for rank 1
  distributed_model model{made};
  model.partition();
}

TEST_CASE("the launcher of ranks that partition", "[.partition_print_run]") {
  launch_options x;
  x.ranks = 2;
  x.command = this_program("[.partition_print_rank]");
  CHECK(launch(x) == 0);
}

TEST_CASE("a program prints its partition once, with what is wrong with it",
          "[runtime][launch]") {
  std::string prints = GENERATE("default", "never");
  program run{
    this_program("[.partition_print_run]"), ".", {{"PRINTS", prints}}};
  CHECK(run.join() == 0);
  INFO(run.output());
  auto count = [&](const std::string& text) {
    size_t result = 0;
    for (size_t at = 0; (at = run.output().find(text, at)) != std::string::npos;
         ++at)
      ++result;
    return result;
  };
  size_t times = prints == "default" ? 1 : 0;
  CHECK(count("modules over 2 devices") == times);
  CHECK(count("warning: device 1 stays idle: nothing is placed there")
        == times);
}
