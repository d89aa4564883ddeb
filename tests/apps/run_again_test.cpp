// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <torch/types.h>

#include <string>
#include <vector>

// smp-train, with default settings, on a model of which a part returns another
// type from its 9th call on, which no earlier call foretold (R42).

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

constexpr const char* config = R"([smp]
pipeline_parallel_degree = 2
microbatches = 2
manual_partition = { part = 1 } # so small a model would be on one rank

[model]
type = "plugin"
library = "LIBRARY"
name = "net"
options.calls = 8

[data]
type = "safetensors"
path = "batch.safetensors"

[optimizer]
type = "sgd"
lr = 0.1

[train]
steps = 7
)";

struct turning_dir : train_dir {
  turning_dir() : train_dir(with_library(config, "model_that_turns")) {
    smp::write_safetensors(path / "batch.safetensors",
                           {{"input0", torch::linspace(-1, 1, 32).view({4, 8})},
                            {"input1", torch::linspace(0, 1, 4)}});
  }
};

} // namespace

TEST_CASE_METHOD(turning_dir,
                 "A run whose calls turn out otherwise runs one step twice and "
                 "has the numbers of calls that wait",
                 "[apps][fast][R42]") {
  auto run = start({"tiny.toml", "--run-dir", "auto"});
  auto code = run.join();
  INFO(run.output());
  REQUIRE(code == 0);
  auto waiting = start(
    {"tiny.toml", "--run-dir", "waiting", "--smp.fast_mode=false"});
  REQUIRE(waiting.join() == 0);
  auto found = metrics("auto");
  auto expected = metrics("waiting");
  REQUIRE(found.size() == 7);
  REQUIRE(expected.size() == 7);
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i]["loss"].get<double>()
          == Catch::Approx(expected[i]["loss"].get<double>()).epsilon(1e-5));
    CHECK(
      found[i]["grad_norm"].get<double>()
      == Catch::Approx(expected[i]["grad_norm"].get<double>()).epsilon(1e-5));
    CHECK(found[i].contains("ran_again") == (i == 4));
    CHECK_FALSE(expected[i].contains("ran_again"));
  }
  CHECK_THAT(found[4]["ran_again"].get<std::string>(),
             ContainsSubstring("module part: result 0 has dtype Double"));
  CHECK_THAT(run.output(), ContainsSubstring("1 of 7 steps, see"));
}

TEST_CASE_METHOD(turning_dir,
                 "A run that is to keep its promises ends with an error that "
                 "names the module",
                 "[apps][fast][R42]") {
  auto run = start({"tiny.toml", "--run-dir", "run", "--smp.fast_mode=true"});
  CHECK(run.join() == 3);
  CHECK_THAT(run.output(),
             ContainsSubstring("module part: result 0 has dtype Double")
               && ContainsSubstring("list 'part' in smp.no_promises"));
  CHECK(metrics("run").size() == 4);
}
