// ctest: seconds=10 processors=2
#include "tests/support/catch.hpp"

#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

// Files that users of the field's tools reported, with the losses of PyTorch in
// one process in the first line of each configuration.

using namespace smp::test;

namespace {

std::vector<double> losses_in_comment(const std::string& config) {
  auto begin = config.find('[');
  auto end = config.find(']');
  REQUIRE(begin < end);
  std::vector<double> result;
  std::istringstream numbers{config.substr(begin + 1, end - begin - 1)};
  for (std::string x; std::getline(numbers, x, ',');)
    result.push_back(std::stod(x));
  return result;
}

} // namespace

TEST_CASE("files of reports train like PyTorch in one process", "[apps]") {
  // A spectral norm that changes what autograd keeps.
  std::string name = "sn_noclone";
  auto schedule = GENERATE("interleaved", "simple");
  scratch_dir scratch;
  std::filesystem::copy(source_file("tests/data/reports"), scratch.path);
  auto expected = losses_in_comment(
    content_of(scratch.path / (name + ".toml")));
  program{{built_program("smp-train"), name + ".toml", "--run-dir", "out",
           std::string{"--smp.pipeline="} + schedule},
          scratch.path}
    .finish();
  std::ifstream metrics{scratch.path / "out/metrics.jsonl"};
  std::vector<double> losses;
  for (std::string line; std::getline(metrics, line);)
    losses.push_back(nlohmann::json::parse(line)["loss"].get<double>());
  REQUIRE(losses.size() == expected.size());
  for (size_t i = 0; i < losses.size(); ++i)
    CHECK(std::abs(losses[i] - expected[i]) < 2e-6);
}
