#include "tests/support/catch.hpp"

#include "runtime/model/native_modules.hpp"
#include "runtime/model/script_walk.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch_near.hpp"
#include "tests/support/torch_script_files.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
std::optional<native_module> find_native(const std::string& type,
                                         const std::string& methods) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto root = empty_script("model", unit);
  auto module = empty_script(type, unit);
  module.register_parameter(
    "weight", type == norm ? torch::ones({4}) : torch::ones({4, 4}), false);
  module.define(methods);
  root.register_module("module", module);
  root.define("def forward(self, x):\n  return self.module.forward(x)\n");
  auto model = walk(root._ivalue());
  return native_of(model, model.find_module("module").value());
}

native_module read(const std::string& type, const std::string& methods) {
  auto found = find_native(type, methods);
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

TEST_CASE("a class of a file is taken for what it is registered as",
          "[runtime][model][tensor_parallel][tp_register]") {
  const std::string type = "own_package.layers.MyLinear";
  CHECK_FALSE(find_native(type, linear_call("forward")));
  tp_register(type, "Linear");
  auto x = read(type, linear_call("forward"));
  CHECK(x.type == "Linear");
  CHECK(x.how != nullptr);
  CHECK(x.doubt == "");
  CHECK_THAT(read(type,
                  "def forward(self, x):\n"
                  "  return torch.relu(torch.linear(x, self.weight, None))\n")
               .doubt,
             ContainsSubstring("more than that of its class: aten::relu"));
  CHECK_FALSE(find_native("own_package.layers.Other", linear_call("forward")));
  CHECK_THAT(error_of([] { tp_register("own_package.layers.B", "Bilinear"); },
                      error_code::config),
             ContainsSubstring("no distributed module is called \"Bilinear\""));
}

TEST_CASE("ranks share a registered class of a file as one process computes it",
          "[runtime][model][tensor_parallel][tp_register]") {
  const std::string type = "own_package.layers.SharedLinear";
  tp_register(type, "Linear");
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  torch::manual_seed(2);
  auto weight = torch::randn({6, 8}), bias = torch::randn({6});
  {
    auto unit = std::make_shared<torch::jit::CompilationUnit>();
    auto root = empty_script("own_model", unit);
    auto fc = empty_script(type, unit);
    fc.register_parameter("weight", weight.clone().set_requires_grad(true),
                          false);
    fc.register_parameter("bias", bias.clone().set_requires_grad(true), false);
    fc.define(
      "def forward(self, x):\n"
      "  return torch.linear(x, self.weight, self.bias)\n");
    root.register_module("fc", fc);
    root.define(
      "def forward(self, x):\n"
      "  return torch.sin(self.fc.forward(x)).mean()\n");
    root.save(path);
  }
  auto data = torch::randn({8, 8});
  std::map<std::string, Tensor> gradients;
  std::string text;
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"fc"};
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{load_script(path)};
    auto train_step = step([&](Tensor x) {
      auto loss = loss_of(model(x));
      model.backward(loss);
      return loss;
    });
    train_step(data.chunk(2).at(data_rank()));
    auto found = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() != 0)
      return;
    gradients = {found.begin(), found.end()};
    text = model.partition_text();
  });
  CHECK_THAT(text, ContainsSubstring("Linear shared by 2 ranks: fc"));
  weight.requires_grad_();
  bias.requires_grad_();
  torch::sin(torch::linear(data, weight, bias)).mean().backward();
  check_near(gradients.at("fc.weight"), weight.grad());
  check_near(gradients.at("fc.bias"), bias.grad());
}
