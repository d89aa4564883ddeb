#include "tests/support/catch.hpp"

#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/deferred_script.hpp"
#include "runtime/session/script_model.hpp"
#include "smp/smp.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/script_files.hpp"

#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

// TorchScript files of which a rank reads what it owns. Whole models over
// several ranks: zoo_test.cpp, script_limit_test.cpp.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 40; // 6400 bytes each

torch::jit::Module one_module() {
  return empty_script("model", std::make_shared<torch::jit::CompilationUnit>());
}

std::string save(const torch::jit::Module& x, const scratch_dir& dir) {
  auto result = (dir.path / "model.pt").string();
  x.save(result);
  return result;
}

size_t count_deferred(const torch::jit::Module& x) {
  size_t result = 0;
  for (const auto& t : x.parameters())
    result += is_deferred(t);
  for (const auto& t : x.buffers())
    result += is_deferred(t);
  return result;
}

at::Tensor attribute(const torch::jit::Module& x, const char* name) {
  return x.attr(name).toTensor();
}

} // namespace

TEST_CASE("a file loaded in the scope has no bytes and then the right ones",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto path = save(script_chain(3, width, 1), dir);
  auto plain = torch::jit::load(path);
  auto found = [&] {
    delay_param_initialization scope;
    return load_script(path);
  }();
  CHECK(count_deferred(found) == 3); // biases are small
  std::map<std::string, at::Tensor> wanted;
  for (auto x : plain.named_parameters(true))
    wanted.emplace(x.name, x.value);
  for (auto x : found.named_parameters(true)) {
    INFO(x.name);
    auto& y = wanted.at(x.name);
    CHECK(x.value.requires_grad() == y.requires_grad());
    CHECK(x.value.is_leaf());
    CHECK(x.value.sizes() == y.sizes());
    initialise_deferred({x.value});
    CHECK(torch::equal(x.value, y));
  }
  auto x = torch::ones({2, width});
  CHECK(
    torch::equal(found.forward({x}).toTensor(), plain.forward({x}).toTensor()));
}

TEST_CASE("a file loaded in the scope trains without a partition as usual",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto path = save(script_chain(3, width, 3), dir);
  auto size = std::filesystem::file_size(path);
  auto train = [](torch::jit::Module model) {
    std::vector<at::Tensor> parameters;
    for (const auto& p : model.parameters())
      parameters.push_back(p);
    torch::optim::SGD sgd{parameters, torch::optim::SGDOptions{0.1}};
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad();
      model.forward({torch::ones({2, width})}).toTensor().backward();
      sgd.step();
    }
    return parameters;
  };
  auto wanted = train(torch::jit::load(path));
  auto found = train(load_deferred_script(path));
  for (size_t i = 0; i < wanted.size(); ++i)
    CHECK(torch::equal(found[i], wanted[i]));
  // What is trained is not the file.
  CHECK(std::filesystem::file_size(path) == size);
  auto again = train(torch::jit::load(path));
  CHECK(torch::equal(again[0], wanted[0]));
}

TEST_CASE("tensors of a file that share memory share it when they are read",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto model = one_module();
  auto table = torch::randn({width, width});
  model.register_buffer("table", table);
  model.register_buffer("same", table);
  model.register_buffer("turned", table.t());
  model.register_buffer("row", table[3]);
  model.register_attribute(
    "pair",
    c10::TupleType::create({c10::TensorType::get(), c10::IntType::get()}),
    c10::ivalue::Tuple::create({table, 1}));
  model.register_attribute("list", c10::ListType::ofTensors(),
                           c10::List<at::Tensor>{table, table[1]});
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("x", table.slice(1, 2, 5));
  model.register_attribute(
    "dict",
    c10::DictType::create(c10::StringType::get(), c10::TensorType::get()),
    dict);
  auto path = save(model, dir);
  auto found = load_deferred_script(path);
  auto item = [&](const char* name) { return attribute(found, name); };
  REQUIRE(is_deferred(item("table")));
  CHECK(item("same").is_same(item("table")));
  auto first = found.attr("pair").toTupleRef().elements()[0].toTensor();
  CHECK(first.is_same(item("table")));
  auto list = found.attr("list").toTensorVector();
  CHECK(list[0].is_same(item("table")));
  auto part = found.attr("dict").toGenericDict().at("x").toTensor();
  CHECK(is_deferred(part));
  CHECK(item("turned").strides() == at::IntArrayRef{1, width});
  CHECK(torch::equal(item("turned"), table.t()));
  // A write through one is seen through all, before they are made and after.
  auto expected = table.clone();
  for (int i = 0; i < 2; ++i) {
    item("row").fill_(i + 7);
    expected[3].fill_(i + 7);
    part.add_(1);
    expected.slice(1, 2, 5).add_(1);
    CHECK(torch::equal(item("table"), expected));
    CHECK(torch::equal(list[1], expected[1]));
    CHECK(torch::equal(item("turned"), expected.t()));
    initialise_deferred({item("table")});
    CHECK_FALSE(is_deferred(part));
  }
}

TEST_CASE("rows of a file's tensor are read some at a time",
          "[runtime][script][delay]") {
  using sizes = std::vector<int64_t>;
  // Several pieces, of which the last one has fewer rows; rows that are larger
  // than a piece; all is one piece.
  auto of = GENERATE(sizes{3000, 50}, sizes{3, 70000}, sizes{70, 5, 9});
  auto type = GENERATE(torch::kFloat, torch::kDouble);
  CAPTURE(of, type);
  scratch_dir dir;
  auto model = one_module();
  auto table = torch::randn(of, type);
  model.register_parameter("table", table, false);
  auto found = load_deferred_script(save(model, dir));
  auto x = attribute(found, "table");
  REQUIRE(is_deferred(x));
  std::vector<at::Tensor> pieces;
  int64_t next = 0;
  auto in_order = true;
  auto done = read_rows(x, [&](int64_t first, const at::Tensor& rows) {
    in_order = in_order && first == next;
    next += rows.size(0);
    pieces.push_back(rows.clone());
  });
  REQUIRE(done);
  CHECK(in_order);
  CHECK(torch::equal(torch::cat(pieces), table));
  CHECK((pieces.size() > 1) == (of != sizes{70, 5, 9}));
  CHECK(is_deferred(x));
  initialise_deferred({x});
  CHECK(torch::equal(x, table));
}

TEST_CASE("rows are not read of what is not a whole tensor of a file",
          "[runtime][script][delay]") {
  auto is_read = [](const at::Tensor& x) {
    return read_rows(x, [](int64_t, const at::Tensor&) {});
  };
  scratch_dir dir;
  auto model = one_module();
  auto table = torch::randn({width, width});
  model.register_buffer("table", table);
  model.register_buffer("turned", table.t());
  model.register_buffer("half", table.narrow(0, width / 2, width / 2));
  auto path = save(model, dir);
  auto found = load_deferred_script(path);
  CHECK(is_read(attribute(found, "table")));
  CHECK_FALSE(is_read(attribute(found, "turned")));
  CHECK_FALSE(is_read(attribute(found, "half")));
  attribute(found, "half").zero_();
  CHECK(is_deferred(attribute(found, "table")));
  CHECK_FALSE(is_read(attribute(found, "table")));
  CHECK_FALSE(is_read(table));
  auto other = load_deferred_script(path);
  save(script_chain(2, width, 2), dir);
  CHECK_THROWS_WITH(is_read(attribute(other, "table")),
                    ContainsSubstring("was written again before"));
}

TEST_CASE("constants of the code are read at once",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto model = one_module();
  model.register_parameter("weight", torch::randn({width, width}), false);
  model.define(
    "def forward(self, x):\n"
    "  return (torch.matmul(x, self.weight)).mean()\n");
  // As a trace leaves it.
  auto graph = model.get_method("forward").graph();
  auto scale = torch::randn({width, width});
  auto* result = graph->outputs()[0];
  torch::jit::WithInsertPoint here{graph->return_node()};
  auto* constant = graph->insertConstant(scale);
  auto* product = graph->insert(c10::aten::mul, {result, constant});
  auto* mean = graph->insert(c10::aten::mean, {product});
  graph->block()->replaceOutput(0, mean);
  auto path = save(model, dir);
  auto found = load_deferred_script(path);
  CHECK(count_deferred(found) == 1);
  auto x = torch::ones({2, width});
  CHECK(torch::equal(found.forward({x}).toTensor(),
                     torch::jit::load(path).forward({x}).toTensor()));
}

TEST_CASE("a file whose code runs on tensors while it is loaded is read whole",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto model = one_module();
  model.register_buffer("table", torch::ones({width, width}));
  model.register_attribute("training", c10::BoolType::get(), true);
  model.define(
    "def __getstate__(self):\n"
    "  return (self.table, self.training)\n");
  model.define(
    "def __setstate__(self, state: Tuple[Tensor, bool]):\n"
    "  self.training = state[1]\n"
    "  self.table = state[0] * 3\n");
  auto found = load_deferred_script(save(model, dir));
  CHECK(count_deferred(found) == 0);
  CHECK(
    torch::equal(attribute(found, "table"), torch::full({width, width}, 3.0)));
}

TEST_CASE("a file that changes before its tensors are read is an error",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto path = save(script_chain(2, width, 1), dir);
  auto model = load_deferred_script(path);
  auto weights = [&] {
    std::vector<at::Tensor> result;
    for (const auto& x : model.parameters())
      result.push_back(x);
    return result;
  }();
  SECTION("written again") {
    save(script_chain(2, width, 2), dir);
    CHECK_THROWS_WITH(initialise_deferred(weights),
                      ContainsSubstring("model.pt' was written again before"));
  }
  SECTION("removed") {
    std::filesystem::remove(path);
    CHECK_THROWS_WITH(initialise_deferred(weights),
                      ContainsSubstring("cannot read '")
                        && ContainsSubstring("No such file"));
  }
}

TEST_CASE("large tensors of other ranks are never read",
          "[runtime][script][delay]") {
  scratch_dir dir;
  auto path = save(script_chain(4, width, 4), dir);
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.threads = 1;
  world.config.trace_device = "none";
  run_virtual_world(2, world, [&](session&) {
    auto made = [&] {
      delay_param_initialization scope;
      return load_script(path);
    }();
    distributed_model model{made};
    model.partition();
    // Or they would be what the file has not any more.
    size_t bytes = 0, owned = 0;
    for (const auto& x : made.parameters()) {
      bytes += x.storage().nbytes();
      if (is_deferred(x))
        throw std::runtime_error{"a deferred parameter is left"};
    }
    for (auto& x : model.local_parameters())
      owned += x.nbytes();
    if (bytes != owned || owned > 4 * (4 * width * width + 4 * width) * 3 / 4)
      throw std::runtime_error{"bytes of another rank"};
  });
}
