#include "tests/support/catch.hpp"

#include "runtime/model/native_modules.hpp"
#include "runtime/model/script_walk.hpp"
#include "tests/support/torch_script_files.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// What a class of a file is taken for, by its name and by its code.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const std::string linear = "torch.nn.modules.linear.Linear";
const std::string norm = "torch.nn.modules.normalization.LayerNorm";

/// A module with a square weight, or the weight of a norm.
/// @param methods of its class
native_module read(const std::string& type, const std::string& methods) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto root = empty_script("model", unit);
  auto module = empty_script(type, unit);
  module.register_parameter(
    "weight", type == norm ? torch::ones({4}) : torch::ones({4, 4}), false);
  module.define(methods);
  root.register_module("module", module);
  root.define("def forward(self, x):\n  return self.module.forward(x)\n");
  auto model = walk(root._ivalue());
  auto found = native_of(model, model.find_module("module").value());
  REQUIRE(found);
  return *found;
}

/// @param eps of each call
std::string norm_calls(const std::string& first, const std::string& second) {
  auto call = [](const std::string& method, const std::string& eps) {
    return "def " + method
           + "(self, x):\n"
             "  return torch.layer_norm(x, [4], self.weight, None, "
           + eps + ", False)\n";
  };
  return call("forward", first) + call("forward1", second);
}

std::string linear_call(const std::string& method) {
  return "def " + method
         + "(self, x):\n  return torch.linear(x, self.weight, None)\n";
}

} // namespace

TEST_CASE("a trace with several calls of a module is still of its class",
          "[runtime][model][tensor_parallel]") {
  auto methods = linear_call("forward");
  for (auto* more : {"forward1", "forward2", "forward11"})
    methods += linear_call(more);
  CHECK(read(linear, methods).doubt == "");
  auto x = read(norm, norm_calls("1e-12", "1e-12"));
  CHECK(x.doubt == "");
  CHECK(x.eps == 1e-12);
  CHECK(x.normalized_shape == std::vector<int64_t>{4});
}

TEST_CASE("each method of a class has to be a call that ranks can share",
          "[runtime][model][tensor_parallel]") {
  CHECK_THAT(
    read(linear, linear_call("forward") + linear_call("penalty")).doubt,
    ContainsSubstring("has a method 'penalty', which would run on a "
                      "part of it"));
  CHECK_THAT(
    read(linear, linear_call("forward") + linear_call("forward_one")).doubt,
    ContainsSubstring("has a method 'forward_one'"));
  CHECK_THAT(read(linear, linear_call("forward")
                            + "def forward1(self, x):\n"
                              "  return torch.relu(torch.linear(x, "
                              "self.weight, None))\n")
               .doubt,
             ContainsSubstring("more than that of its class: aten::relu"));
  CHECK_THAT(read(norm, norm_calls("1e-12", "1e-5")).doubt,
             ContainsSubstring("'forward1' in its code has other options than "
                               "an earlier call"));
}
