// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <csignal>
#include <string>

using namespace smp::test;

// UCX asks nobody who connects who he is, and takes what was recorded of
// another run for a rank: it may kill the process (docs/secret.md).
TEST_CASE("On one machine no rank listens at any port", "[apps][secret]") {
  // Nor where the configuration would let it, as it serves other runs, too.
  auto trusted = GENERATE("false", "true");
  CAPTURE(trusted);
  train_dir dir{tiny_gpt(2, 2, 4, R"([train]
steps = 1000000
log_interval = 1
eval_steps = 0
)")};
  auto run = dir.start({"tiny.toml", "--run-dir", "run",
                        std::string{"--transport.trusted_network="} + trusted});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 2);
  // Seen with the same eyes: the SUPERVISOR's gate, and the door of
  // smp-inspect.
  CHECK_FALSE(listening_ports_of(run.pid()).empty());
  for (auto x : ranks)
    CHECK(listening_ports_of(x).empty());
  run.signal(SIGINT);
  CHECK(run.join() == 130);
}
