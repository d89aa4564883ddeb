// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/markdown.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

// examples/export_model.py, where there is a Python with PyTorch.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

/// Runs a command there and requires that it ends well.
/// @returns what it printed
std::string run(const scratch_dir& dir, std::vector<std::string> command) {
  program x{std::move(command), dir.path};
  auto code = x.join(std::chrono::minutes{2});
  INFO(x.output());
  REQUIRE(code == 0);
  return x.output();
}

} // namespace

TEST_CASE_METHOD(scratch_dir, "what Python exports is verified and trained",
                 "[apps][examples]") {
  auto* python = std::getenv("SMP_PYTHON");
  if (!python)
    SKIP("SMP_PYTHON names no Python with PyTorch");
  auto said = run(*this, {python, source_file("examples/export_model.py")});
  auto at = said.rfind("loss ");
  REQUIRE(at != std::string::npos);
  auto loss = std::stod(said.substr(at + 5));
  auto train = built_program("smp-train");
  CHECK_THAT(run(*this, {train, "verify", "run.toml", "--split"}),
             ContainsSubstring("equal: 3 steps"));
  run(*this, {train, "run.toml", "--run-dir", "out"});
  auto steps = lines_of(read("out/metrics.jsonl"));
  REQUIRE(steps.size() == 50);
  auto loss_of = [](const std::string& line) {
    return nlohmann::json::parse(line).at("loss").get<double>();
  };
  CHECK(loss_of(steps.front()) == Catch::Approx(loss).epsilon(1e-4));
  CHECK(loss_of(steps.back()) < 0.9 * loss);
}
