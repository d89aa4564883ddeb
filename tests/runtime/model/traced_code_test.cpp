#include "tests/support/catch.hpp"

#include "runtime/model/script_code.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/model/traced_code.hpp"
#include "tests/support/runs/program.hpp"

#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <string>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

torch::jit::Module load(const std::string& file) {
  return torch::jit::load(source_file("tests/data/" + file));
}

std::string warning_of(const std::string& file) {
  return warning_of_evaluation(walk(load(file)._ivalue()));
}

} // namespace

TEST_CASE("a trace of evaluation mode is told from one of training",
          "[runtime][model]") {
  CHECK_THAT(warning_of("script/evaluated.pt"),
             ContainsSubstring("traced in evaluation mode")
               && ContainsSubstring("dropout drops nothing")
               && ContainsSubstring("after model.train()"));
  CHECK(warning_of("script/traced.pt") == ""); // no dropout
  CHECK(warning_of("script/norms.pt") == "");  // scripted
  CHECK(warning_of("zoo/hf_gpt2.pt") == "");   // traced in training
  CHECK(warning_of("zoo/dropout.pt") == "");
  torch::nn::Sequential native{torch::nn::Linear(2, 2)};
  CHECK(warning_of_evaluation(walk(*native)) == "");
}

TEST_CASE("a size that a trace has as a number is found", "[runtime][model]") {
  auto model = load("script/rows.pt");
  auto type = model.attr("turned").toModule().type();
  auto* code = graph_of(*type, "forward");
  REQUIRE(code);
  CHECK(fixes_size(*code, 8));
  CHECK_FALSE(fixes_size(*code, 16));
  CHECK_FALSE(fixes_size(*model.get_method("forward").graph(), 8));
}
