#include "tests/support/catch.hpp"

#include "runtime/model/script_walk.hpp"
#include "runtime/nn/distributed.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/sharing/tp_register.hpp"
#include "runtime/train/script_trainable.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/script_files.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "tp/functions.hpp"
#include "tp/module_options.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
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

namespace {

/// Saves a model whose `fc` is of a class with these methods.
/// @param call what the model does with `x`
void save_model_of(const std::string& path, const std::string& type,
                   const std::map<std::string, Tensor>& parameters,
                   const std::string& methods, const std::string& call) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto root = empty_script("own_model", unit);
  auto fc = empty_script(type, unit);
  for (auto& [name, x] : parameters)
    fc.register_parameter(name, x.detach().clone().set_requires_grad(true),
                          false);
  fc.define(methods);
  root.register_module("fc", fc);
  root.define("def forward(self, x):\n" + call);
  root.save(path);
}

struct shared_run {
  std::string text;
  std::map<std::string, Tensor> gradients;
};

/// One step of two ranks that share `fc`, each with its half of the samples.
/// @param pipeline 2: the model's own code is on another rank than `fc`
shared_run share_fc(const std::string& path, const Tensor& data,
                    uint64_t pipeline = 1) {
  shared_run result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = pipeline;
  world.config.auto_partition = pipeline == 1;
  world.config.default_partition = pipeline - 1;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"fc"};
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2 * pipeline, world, [&](session& s) {
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
    result.gradients = {found.begin(), found.end()};
    result.text = model.partition_text();
  });
  return result;
}

/// Cuts a weight along its outputs, and gathers what it gives.
struct distributed_gate {
  static parameter_axes axes(const double&) {
    return {{"weight", 1}};
  }
  distributed_gate(const double& x, const smp::nn::parameter_parts& parts)
    : slope(x), weight(parts.at("weight")) {
    // nop
  }
  Tensor forward(const Tensor& x, double scale) const {
    auto all = smp::nn::fused_allgather_for_tp(x, 0);
    auto y = torch::leaky_relu(all.matmul(weight), slope) * scale;
    return smp::nn::scatter_and_merge_for_tp(y, 0, -1);
  }
  double slope;
  Tensor weight;
};

} // namespace

TEST_CASE("ranks share a registered class of a file as one process computes it",
          "[runtime][model][tensor_parallel][tp_register]") {
  const std::string type = "own_package.layers.SharedLinear";
  tp_register(type, "Linear");
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  torch::manual_seed(2);
  auto weight = torch::randn({6, 8}), bias = torch::randn({6});
  save_model_of(path, type, {{"weight", weight}, {"bias", bias}},
                "def forward(self, x):\n"
                "  return torch.linear(x, self.weight, self.bias)\n",
                "  return torch.sin(self.fc.forward(x)).mean()\n");
  auto data = torch::randn({8, 8});
  auto [text, gradients] = share_fc(path, data);
  CHECK_THAT(text, ContainsSubstring("Linear shared by 2 ranks: fc"));
  weight.requires_grad_();
  bias.requires_grad_();
  torch::sin(torch::linear(data, weight, bias)).mean().backward();
  check_near(gradients.at("fc.weight"), weight.grad());
  check_near(gradients.at("fc.bias"), bias.grad());
}

TEST_CASE("ranks share a class of a file through hooks",
          "[runtime][model][tensor_parallel][tp_register]") {
  auto pipeline = GENERATE(1u, 2u);
  CAPTURE(pipeline);
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  torch::manual_seed(2);
  auto data = torch::randn({8, 8});
  auto weight = torch::randn({8, 6}).requires_grad_();
  auto offset = torch::randn({6}).requires_grad_();
  SECTION("one of smp's distributed modules") {
    const std::string type = "own_package.layers.Kernel";
    tp_register<smp::nn::distributed_linear>(
      type,
      [](const torch::jit::Module& x) {
        return linear_options{.weight = x.hasattr("kernel") ? "kernel" : "",
                              .bias = "offset",
                              .inputs_first = true};
      },
      [](const Tensor& x, double scale, const std::optional<Tensor>& mask) {
        return (mask ? x * *mask : x) * scale;
      },
      [](const Tensor& y) {
        return std::tuple{y, y.sum(-1)};
      });
    save_model_of(path, type, {{"kernel", weight}, {"offset", offset}},
                  "def forward(self, x, scale: float, mask: "
                  "Optional[Tensor]=None) -> Tuple[Tensor, Tensor]:\n"
                  "  y = torch.addmm(self.offset, x * scale, self.kernel)\n"
                  "  return y, y.sum(-1)\n",
                  "  y, s = self.fc.forward(x, 0.5)\n"
                  "  return torch.sin(y).mean() + s.square().mean()\n");
    auto [text, gradients] = share_fc(path, data, pipeline);
    CHECK_THAT(text, ContainsSubstring("Conv1D shared by 2 ranks: fc"));
    auto y = torch::addmm(offset, data * 0.5, weight);
    (torch::sin(y).mean() + y.sum(-1).square().mean()).backward();
    check_near(gradients.at("fc.kernel"), weight.grad());
    check_near(gradients.at("fc.offset"), offset.grad());
  }
  SECTION("a distributed module of the user's") {
    const std::string type = "own_package.layers.Gate";
    tp_register<distributed_gate>(
      type, [](const torch::jit::Module&) { return 0.2; });
    save_model_of(path, type, {{"weight", weight}},
                  "def forward(self, x, scale: float):\n"
                  "  return torch.leaky_relu(x.matmul(self.weight), 0.2) * "
                  "scale\n",
                  "  return torch.sin(self.fc.forward(x, 0.5)).mean()\n");
    auto [text, gradients] = share_fc(path, data, pipeline);
    CHECK_THAT(text, ContainsSubstring("distributed_gate shared by 2 ranks: "
                                       "fc"));
    torch::sin(torch::leaky_relu(data.matmul(weight), 0.2) * 0.5)
      .mean()
      .backward();
    check_near(gradients.at("fc.weight"), weight.grad());
  }
}

TEST_CASE("hooks get no parameters that a trace passes to their module",
          "[runtime][model][tensor_parallel][tp_register]") {
  auto pipeline = GENERATE(1u, 2u);
  CAPTURE(pipeline);
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  torch::manual_seed(2);
  auto data = torch::randn({8, 8});
  auto kernel = torch::randn({6, 8}).requires_grad_();
  auto offset = torch::randn({6}).requires_grad_();
  const std::string type = "own_package.layers.Traced";
  tp_register<smp::nn::distributed_linear>(
    type,
    [](const torch::jit::Module&) {
      return linear_options{.weight = "kernel", .bias = "offset"};
    },
    [](const Tensor& x, const Tensor& scale) { return x * scale; });
  save_model_of(path, type, {{"kernel", kernel}, {"offset", offset}},
                "def forward(self, kernel, offset, x, scale):\n"
                "  return torch.linear(x * scale, kernel, offset)\n",
                "  fc = self.fc\n"
                "  y = fc.forward(fc.kernel, fc.offset, x, x.exp())\n"
                "  return torch.sin(y).mean()\n");
  auto [text, gradients] = share_fc(path, data, pipeline);
  CHECK_THAT(text, ContainsSubstring("Linear shared by 2 ranks: fc"));
  torch::sin(torch::linear(data * data.exp(), kernel, offset))
    .mean()
    .backward();
  check_near(gradients.at("fc.kernel"), kernel.grad());
  check_near(gradients.at("fc.offset"), offset.grad());
}

TEST_CASE("a library of operators registers a class of a file with hooks",
          "[runtime][model][tensor_parallel][tp_register]") {
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  torch::manual_seed(2);
  auto data = torch::randn({8, 8});
  auto weight = torch::randn({6, 8}).requires_grad_();
  save_model_of(path, "own_package.layers.Scaled", {{"weight", weight}},
                "def forward(self, x, scale: float):\n"
                "  return torch.linear(x, self.weight, None) * scale\n",
                "  return torch.sin(self.fc.forward(x, 3.)).mean()\n");
  auto library = built_program("../lib/model_operators.so");
  make_script_trainable(path, {std::filesystem::canonical(library)});
  auto [text, gradients] = share_fc(path, data);
  CHECK_THAT(text, ContainsSubstring("Linear shared by 2 ranks: fc"));
  torch::sin(torch::linear(data, weight) * 3.).mean().backward();
  check_near(gradients.at("fc.weight"), weight.grad());
}

TEST_CASE("hooks that do not fit a class of a file are told",
          "[runtime][model][tensor_parallel][tp_register]") {
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  auto data = torch::randn({8, 8});
  const std::string type = "own_package.layers.Misfit";
  auto linear_of_it = [](const torch::jit::Module&) {
    return linear_options{};
  };
  auto save = [&](const std::string& more) {
    save_model_of(path, type, {{"weight", torch::randn({6, 8})}},
                  linear_call("forward") + more,
                  "  return self.fc.forward(x).mean()\n");
  };
  save("");
  tp_register<smp::nn::distributed_linear>(
    type, linear_of_it,
    [](const Tensor& x, double scale) { return x * scale; });
  CHECK_THAT(error_of([&] { share_fc(path, data); }, error_code::user_code),
             ContainsSubstring("the forward hook of own_package.layers.Misfit "
                               "takes 2 arguments, but its forward has 1"));
  tp_register<smp::nn::distributed_linear>(type, linear_of_it, [](double x) {
    return torch::full({8, 8}, x);
  });
  CHECK_THAT(error_of([&] { share_fc(path, data); }, error_code::user_code),
             ContainsSubstring("as its argument 0 than what the file gives, a "
                               "Tensor"));
  tp_register<smp::nn::distributed_linear>(
    type, [](const torch::jit::Module& x) {
      return linear_options{.weight = x.attr("name").toStringRef()};
    });
  CHECK_THAT(error_of([&] { share_fc(path, data); }, error_code::config),
             ContainsSubstring("the init hook of own_package.layers.Misfit "
                               "failed for 'fc'"));
  tp_register<smp::nn::distributed_linear>(type, linear_of_it);
  save(linear_call("penalty"));
  CHECK_THAT(share_fc(path, data).text,
             ContainsSubstring("Linear not shared, as its class has a method "
                               "'penalty'"));
}

TEST_CASE("a configuration registers classes of a file",
          "[runtime][model][tensor_parallel][tp_register]") {
  scratch_dir dir;
  std::string path = dir.path / "model.pt";
  save_model_of(path, "own_package.layers.Configured",
                {{"weight", torch::randn({6, 8})}}, linear_call("forward"),
                "  return self.fc.forward(x).mean()\n");
  auto text = [&](const std::string& entry) {
    std::string result;
    virtual_world_options world;
    world.config.tensor_parallel_degree = 2;
    world.config.tensor_parallel_modules = {"fc"};
    world.config.tensor_parallel_register = {entry};
    world.config.ddp = true;
    run_virtual_world(2, world, [&](session& s) {
      distributed_model model{load_script(path)};
      model.partition();
      if (s.rank() == 0)
        result = model.partition_text();
    });
    return result;
  };
  CHECK_THAT(text("own_package.layers.Configured as Linear"),
             ContainsSubstring("Linear shared by 2 ranks: fc"));
  CHECK_THAT(error_of([&] { text("own_package.layers.Configured as Linaer"); },
                      error_code::config),
             ContainsSubstring("tensor_parallel.register has ")
               && ContainsSubstring("no distributed module is called"));
  CHECK_THAT(error_of([&] { text("own_package.layers.Confgured as Linear"); },
                      error_code::config),
             ContainsSubstring("no module of the model is of class "
                               "\"own_package.layers.Confgured\"; "
                               "\"own_package.layers.Configured\"?"));
}
