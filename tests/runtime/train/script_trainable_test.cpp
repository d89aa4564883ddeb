#include "tests/support/catch.hpp"

#include "runtime/train/script_trainable.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"

#include <torch/types.h>

#include <filesystem>
#include <string>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("a file with operators of a library names them, and that loads them",
          "[runtime][train][script]") {
  auto path = source_file("tests/data/script/outside_operator.pt");
  auto text = error_of([&] { make_script_trainable(path); },
                       error_code::config);
  CHECK_THAT(text, ContainsSubstring("outside_operator.pt' calls "
                                     "smp_test::twice, which")
                     && ContainsSubstring("model.operator_libraries"));
  CHECK_THAT(
    error_of([&] { make_script_trainable(path, {path}); }, error_code::config),
    ContainsSubstring("model.operator_libraries: ")
      && ContainsSubstring("invalid ELF header"));

  auto library = std::filesystem::canonical(
    built_program("../lib/model_operators.so"));
  auto model = make_script_trainable(path, {library, library});
  auto loss = model->loss({torch::ones({2, 8})});
  loss.backward();
  CHECK(model->named_parameters().front().second.grad().defined());
}
