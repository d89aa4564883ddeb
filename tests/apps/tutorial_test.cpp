// ctest: seconds=21 label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/markdown.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"

#include <torch/serialize/input-archive.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

// docs/tutorial.md and its programs: what they show and what they compute.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

struct shown {
  double loss = 0;
  double norm = 0;
};

/// By step, what lines such as "step 10: loss 2.1840, norm 0.613" say.
std::map<int, shown> steps_in(const std::string& output) {
  std::istringstream in{output};
  std::map<int, shown> result;
  for (std::string line; std::getline(in, line);) {
    int step = 0;
    shown x;
    if (std::sscanf(line.c_str(), "step %d: loss %lf, norm %lf", &step, &x.loss,
                    &x.norm)
        == 3)
      result[step] = x;
  }
  return result;
}

/// They were added in another order, and both are rounded.
void check_near(const shown& x, const shown& plain) {
  CHECK(x.loss == Catch::Approx(plain.loss).epsilon(1e-3).margin(2e-3));
  CHECK(x.norm == Catch::Approx(plain.norm).epsilon(1e-2).margin(2e-3));
}

void add_tensors(torch::serialize::InputArchive& from,
                 const std::string& prefix, numbers& to) {
  for (auto& key : from.keys()) {
    torch::Tensor x;
    torch::serialize::InputArchive below;
    if (from.try_read(key, x))
      to.emplace(prefix + key, x.detach());
    else if (from.try_read(key, below))
      add_tensors(below, prefix + key + '.', to);
  }
}

/// What torch::save wrote of a module.
numbers weights_in(const std::filesystem::path& file) {
  torch::serialize::InputArchive archive;
  archive.load_from(file.string());
  numbers result;
  add_tensors(archive, "", result);
  return result;
}

struct tutorial_programs : scratch_dir {
  /// Runs a program that was built, and requires that it ends well.
  /// @returns what it printed
  std::string run(std::vector<std::string> command) const {
    command[0] = built_program(command[0]);
    program x{command, path};
    auto code = x.join(std::chrono::minutes{4});
    INFO(x.output());
    REQUIRE(code == 0);
    return x.output();
  }
};

/// @returns the page
std::string tutorial() {
  return content_of(source_file("docs/tutorial.md"));
}

} // namespace

TEST_CASE("docs/tutorial.md shows its programs as they are",
          "[apps][examples]") {
  auto page = tutorial();
  CHECK(code_block(page, "## One process")
        == content_of(source_file("examples/tutorial_plain.cpp")));
  std::vector<text_lines> sources;
  for (auto path :
       {"examples/tutorial_plain.cpp", "examples/tutorial.cpp",
        "examples/tutorial_model.hpp", "examples/plugin_tutorial.cpp"})
    sources.push_back(lines_of(content_of(source_file(path))));
  auto blocks = code_blocks(page);
  CHECK(blocks.size() >= 8);
  for (auto& block : blocks) {
    REQUIRE_FALSE(block.empty());
    INFO(block.front());
    CHECK(std::ranges::any_of(
      sources, [&](auto& source) { return stands_in(block, source); }));
  }
}

TEST_CASE_METHOD(tutorial_programs,
                 "two ranks learn what the plain program learns, and go on",
                 "[apps][examples]") {
  auto plain = steps_in(run({"tutorial_plain"}));
  REQUIRE(plain.size() == 5);
  CHECK(plain.at(50).loss < 0.9 * plain.at(10).loss);
  auto expected = weights_in(path / "model.pt");
  REQUIRE(expected.size() == 4 * 6 + 3 * 2);
  std::filesystem::remove(path / "model.pt");

  auto output = run({"tutorial", "--ranks", "2"});
  CHECK_THAT(output, ContainsSubstring("21 modules over 2 devices"));
  CHECK_THAT(output, !ContainsSubstring("warning"));
  auto on_two = steps_in(output);
  REQUIRE(on_two.size() == 5);
  for (auto& [step, x] : plain) {
    CAPTURE(step);
    check_near(on_two.at(step), x);
  }
  auto found = weights_in(path / "model.pt");
  CHECK(differences(found, expected, false, {.share = 0, .least = 2e-3})
        == std::vector<std::string>{});

  // From step 40, on twice as many ranks.
  auto rest = steps_in(run({"tutorial", "--ranks", "4"}));
  REQUIRE(rest.size() == 1);
  check_near(rest.at(50), plain.at(50));
}

TEST_CASE_METHOD(tutorial_programs,
                 "replicas and shared blocks learn what the plain program does",
                 "[apps][examples]") {
  auto share = GENERATE(false, true);
  CAPTURE(share);
  auto plain = steps_in(run({"tutorial_plain"}));
  REQUIRE(plain.size() == 5);
  std::vector<std::string> command{"tutorial", "--ranks", "4"};
  if (share)
    command.push_back("--share");
  auto output = run(command);
  const std::string shared = "Linear shared by 2 ranks: blocks.0.up";
  CHECK((output.find(shared) != std::string::npos) == share);
  auto on_four = steps_in(output);
  REQUIRE(on_four.size() == 5);
  for (auto& [step, x] : plain) {
    CAPTURE(step);
    check_near(on_four.at(step), x);
  }
}

TEST_CASE_METHOD(tutorial_programs, "the tutorial's plug-in is verified",
                 "[apps][examples][verify]") {
  auto config = code_block(tutorial(), "## Verify", "toml");
  const std::string name = "libplugin_tutorial.so";
  auto at = config.find(name);
  REQUIRE(at != std::string::npos);
  auto library = std::filesystem::canonical(built_program("../lib/" + name));
  write("run.toml", config.replace(at, name.size(), library.string()));
  smp::write_safetensors(
    (path / "batch.safetensors").string(),
    {{"input0", torch::linspace(-1, 1, 32 * 32).view({32, 32})},
     {"input1", torch::arange(32).remainder(10)}});
  auto output = run({"smp-train", "verify", "run.toml", "--split"});
  CHECK_THAT(output, ContainsSubstring("equal: 3 steps"));
  CHECK_THAT(output, !ContainsSubstring("nothing that crosses"));
}
