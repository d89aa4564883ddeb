#include "tests/support/catch.hpp"

#include "runtime/train/plugin.hpp"
#include "tests/support/error_of.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "tests/support/config_text.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/plain_gpt.hpp"

#include <torch/torch.h>

#include <map>
#include <string>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

using options = std::map<std::string, std::string>;

/// A library that was built with the tests.
std::string library(const std::string& name) {
  auto path = std::filesystem::path{built_program("smp-train")}.parent_path()
              / ".." / "lib" / (name + ".so");
  REQUIRE(std::filesystem::is_regular_file(path));
  return std::filesystem::canonical(path);
}

std::string message_of(const std::string& path, const std::string& name,
                       const options& x = {}) {
  return smp::test::error_of(
    [&] { smp::make_plugin_model(path, name, smp::model_options{x}); },
    smp::error_code::config);
}

/// input0, input1: [8, 8], input2: [8]
smp::named_tensors fixed_inputs() {
  torch::manual_seed(5);
  return {{"input0", torch::randn({8, 8})},
          {"input1", torch::randn({8, 8})},
          {"input2", torch::randn({8})}};
}

} // namespace

TEST_CASE("A plug-in brings a model with its loss and its options",
          "[runtime][plugin]") {
  auto path = library("libplugin_model");
  torch::manual_seed(1);
  auto model = smp::make_plugin_model(path, "two_towers",
                                      smp::model_options{{{"width", "6"}}});
  std::map<std::string, torch::Tensor> p;
  for (auto& [name, x] : model->named_parameters())
    p.emplace(name, x);
  CHECK(p.size() == 10);
  CHECK(p.at("left.0.weight").sizes() == torch::IntArrayRef{6, 8});
  smp::batch xs;
  for (auto& [name, x] : fixed_inputs())
    xs.push_back(x);
  auto tower = [&](const std::string& name, torch::Tensor x) {
    for (std::string i : {"0", "2"})
      x = torch::tanh(torch::matmul(x, p.at(name + "." + i + ".weight").t())
                      + p.at(name + "." + i + ".bias"));
    return x;
  };
  auto both = torch::cat({tower("left", xs[0]), tower("right", xs[1])}, 1);
  auto y = torch::matmul(both, p.at("head.weight").t()) + p.at("head.bias");
  auto expected = (y.squeeze(1) - xs[2]).pow(2).mean();
  CHECK(excess(model->loss(xs).detach(), expected.detach()) <= 0);
  xs.pop_back();
  CHECK_THROWS_WITH(model->loss(xs),
                    ContainsSubstring("the data has 2 tensors, but forward of "
                                      "this model takes 3"));
}

TEST_CASE("A plug-in that cannot be used is refused with the way out",
          "[runtime][plugin]") {
  auto path = library("libplugin_model");
  CHECK_THAT(message_of("/nowhere/libx.so", "x"),
             ContainsSubstring("\"/nowhere/libx.so\" is not a file"));
  scratch_dir dir;
  auto text = dir.write("libtext.so", "no library");
  CHECK_THAT(message_of(text, "x"),
             ContainsSubstring(text + "\" cannot be loaded: "));
  CHECK_THAT(message_of(path, "tow_towers"),
             ContainsSubstring("model.name = \"tow_towers\" is not in " + path
                               + "; it has: \"two_towers\""));
  CHECK_THAT(message_of(library("model_library_without_model"), "x"),
             ContainsSubstring("registers no model"));
  // Both times: a library is loaded once, its mismatch stays.
  for (int i = 0; i < 2; ++i)
    CHECK_THAT(message_of(library("model_of_another_build"), "net"),
               ContainsSubstring("was built for interface 0, ")
                 && ContainsSubstring("this smp is interface 1, ")
                 && ContainsSubstring("build it again"));
  CHECK_THAT(message_of(path, "two_towers", {{"width", "many"}}),
             ContainsSubstring("model.options.width = many is not an integer"));
  CHECK_THAT(message_of(path, "two_towers", {{"depth", "3"}}),
             ContainsSubstring("model.options.depth is not an option of this "
                               "model; it has: width"));
}

TEST_CASE("Options are read as what the model asks for", "[runtime][plugin]") {
  smp::model_options x{
    {{"n", "-3"}, {"x", "0.5"}, {"b", "true"}, {"s", "a b"}}};
  CHECK(x.integer("n", 1) == -3);
  CHECK(x.number("x", 1) == 0.5);
  CHECK(x.number("n", 1) == -3);
  CHECK_THROWS_AS(x.check_all_used(), smp::error);
  CHECK(x.flag("b", false));
  CHECK(x.text("s", "") == "a b");
  CHECK_NOTHROW(x.check_all_used());
  CHECK(x.integer("absent", 7) == 7);
  CHECK_THROWS_AS(x.integer("x", 1), smp::error);
  CHECK_THROWS_AS(x.flag("s", true), smp::error);
}

TEST_CASE("Options in a configuration belong to a plug-in",
          "[runtime][plugin]") {
  const std::string text = R"([smp]
microbatches = 2
[model]
type = "plugin"
library = "libx.so"
name = "net"
[model.options]
width = 8
rate = 0.5
fast = true
label = "a b"
[data]
type = "safetensors"
path = "batch.safetensors"
[train]
steps = 1
)";
  auto x = config_of(text);
  CHECK(x.model.options
        == options{
          {"width", "8"}, {"rate", "0.5"}, {"fast", "true"}, {"label", "a b"}});
  CHECK(config_of(text, {"--model.options.width=9"}).model.options.at("width")
        == "9");
  CHECK(shared_settings(config_of(text, {"--model.options.width=9"}))
        != shared_settings(x));
  CHECK(config_of(to_toml(x)).model.options == x.model.options);
  auto errors = parse(text, {"--model.type=mlp"}).errors;
  CHECK(std::any_of(errors.begin(), errors.end(), [](auto& line) {
    return line
           == "run.toml:8: model.options has no effect with model.type = "
              "\"mlp\"; it belongs to \"plugin\"";
  }));
  CHECK_THAT(parse(text, {"--model.options.sizes=[1,2]"}).errors.at(0),
             ContainsSubstring("model.options.sizes needs a string"));
}

TEST_CASE("smp-train trains a plug-in's model on two ranks",
          "[runtime][plugin]") {
  scratch_dir dir;
  smp::write_safetensors(dir.path / "batch.safetensors", fixed_inputs());
  dir.write("run.toml", R"([smp]
pipeline_parallel_degree = 2
microbatches = 4
[model]
type = "plugin"
library = ")" + library("libplugin_model")
                          + R"("
name = "two_towers"
[model.options]
width = 6
[data]
type = "safetensors"
path = "batch.safetensors"
[optimizer]
lr = 0.05
[train]
steps = 8
dump_gradients = [1]
save_model = true
)");
  program run{{built_program("smp-train"), "run.toml", "--run-dir", "out"},
              dir.path};
  auto code = run.join();
  INFO(run.output());
  REQUIRE(code == 0);
  // The same in this process.
  torch::manual_seed(1);
  auto model = smp::make_plugin_model(library("libplugin_model"), "two_towers",
                                      smp::model_options{{{"width", "6"}}});
  smp::batch xs;
  for (auto& [name, x] : fixed_inputs())
    xs.push_back(x);
  model->loss(xs).backward();
  auto found = smp::read_safetensors(dir.path / "out/gradients-1.safetensors");
  CHECK(found.tensors.size() == 10);
  for (auto& [name, x] : model->named_parameters()) {
    INFO(name);
    REQUIRE(found.find(name) != nullptr);
    CHECK(excess(*found.find(name), x.grad()) <= 0);
  }
  CHECK(smp::read_safetensors(dir.path / "out/model.safetensors").tensors.size()
        == 10);
}
