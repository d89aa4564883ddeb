// ctest: seconds=84 label=proof processors=2
#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <chrono>
#include <string>

// The README's first example, as it stands there.

using namespace smp::test;

namespace {

/// @returns the number that follows the last `before` in `text`.
double number_after(const std::string& text, const std::string& before) {
  auto begin = text.rfind(before);
  REQUIRE(begin != text.npos);
  return std::stod(text.substr(begin + before.size()));
}

} // namespace

TEST_CASE("The quickstart learns how letters follow each other",
          "[apps][train]") {
  train_dir dir{""};
  auto run = dir.start(
    {source_file("config/quickstart.toml"), "--run-dir", "run"});
  auto code = run.join(std::chrono::minutes{18});
  INFO(run.output());
  REQUIRE(code == 0);
  auto steps = dir.metrics("run");
  REQUIRE(steps.size() == 100);
  // What a model reaches that only knows how often each byte occurs; of the
  // held-out tenth of config/data/opticks.txt.
  auto unigram = number_after(run.output(), "unigram entropy ");
  CHECK(unigram == Catch::Approx(3.1292).margin(1e-3));
  auto held_out = number_after(run.output(), "held out  ");
  CHECK(held_out < unigram - 0.4);
  // It was trained by both ranks.
  for (auto& step : steps)
    CHECK(step["requests"].get<int>() > 0);
}
