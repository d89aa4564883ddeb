#include "tests/support/catch.hpp"

#include "runtime/model/model_map.hpp"
#include "runtime/model/module_facts.hpp"
#include "runtime/model/script_walk.hpp"
#include "tests/support/nothing_left.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/script_files.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

// A TorchScript model whose code sets attributes trains on when a promise does
// not hold: they are put back with the step (docs/modes.md).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

using torch::jit::Module;

Module empty_module(const std::string& name) {
  return empty_script(name, std::make_shared<torch::jit::CompilationUnit>());
}

/// What code may do to attributes, and to a list that has two names.
Module busy_module() {
  auto result = empty_module("Busy");
  c10::List<double> list{1.0};
  c10::Dict<std::string, double> dict;
  dict.insert("a", 1.0);
  result.register_attribute("n", c10::IntType::get(), int64_t{3});
  result.register_attribute("xs", c10::ListType::ofFloats(), list);
  result.register_attribute("ys", c10::ListType::ofFloats(), list);
  result.register_attribute(
    "d", c10::DictType::create(c10::StringType::get(), c10::FloatType::get()),
    dict);
  result.register_attribute("t", c10::TensorType::get(), torch::zeros({2}));
  result.register_attribute("still", c10::IntType::get(), int64_t{7});
  result.define(R"(
    def forward(self, x):
      self.n = self.n + 1
      self.xs.append(2.0)
      self.ys.append(3.0)
      self.d["a"] = 5.0
      self.d["b"] = 6.0
      self.t.add_(1.0)
      self.t = x
      return x
  )");
  return result;
}

/// A model of which this rank has everything.
struct whole_model {
  explicit whole_model(const Module& x) {
    map.replace(walk(x._ivalue()), {}); // tells what has an order
  }

  std::unique_ptr<kept_attributes> keep() const {
    return map.model().modules[0].facts->keep_attributes();
  }

  model_map map{rank_id{0}, 1, {}};
};

} // namespace

TEST_CASE("attributes of TorchScript are put back as what they were",
          "[runtime][script][R42]") {
  auto module = busy_module();
  whole_model whole{module};
  auto& map = whole.map;
  auto t = module.attr("t").toTensor();
  auto kept = whole.keep();
  REQUIRE(kept);
  CHECK(kept->complete());
  auto x = torch::ones({3});
  module.forward({x});
  REQUIRE(module.attr("n").toInt() == 4);
  REQUIRE(module.attr("xs").toDoubleVector().size() == 3);
  REQUIRE(module.attr("t").toTensor().is_same(x));
  map_changes changes{map};
  kept->put_back(&changes);
  CHECK(module.attr("n").toInt() == 3);
  CHECK(module.attr("xs").toDoubleVector() == std::vector<double>{1.0});
  CHECK(module.attr("xs").is(module.attr("ys"))); // one list still
  auto dict = module.attr("d").toGenericDict();
  CHECK(dict.size() == 1);
  CHECK(dict.at("a").toDouble() == 1.0);
  CHECK(module.attr("t").toTensor().is_same(t));
  CHECK(torch::equal(t, torch::zeros({2})));
  CHECK(map.model().find(t) >= 0);
}

TEST_CASE("what nobody can copy in an attribute is noticed",
          "[runtime][script][R42]") {
  auto module = empty_module("Waits");
  auto type = c10::FutureType::create(c10::IntType::get());
  module.register_attribute(
    "later", type,
    c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get()));
  module.define(R"(
    def forward(self, x):
      self.later = self.later
      return x
  )");
  whole_model whole{module};
  auto kept = whole.keep();
  REQUIRE(kept);
  CHECK_FALSE(kept->complete());
}

// -- a whole step -------------------------------------------------------------

namespace {

constexpr size_t steps = 5;
constexpr size_t microbatches = 2;
/// In this step results have another type than in those before.
constexpr size_t broken = 2;

void write_counting(const std::string& path) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto weight = [] { return torch::ones({3}).set_requires_grad(true); };
  auto count = empty_script("Count", unit);
  count.register_parameter("weight", weight(), false);
  count.register_buffer("total", torch::zeros({1}));
  count.register_attribute("calls", c10::IntType::get(), int64_t{0});
  count.register_attribute("sums", c10::ListType::ofFloats(),
                           c10::List<double>{0.0});
  count.register_attribute("last", c10::TensorType::get(), torch::zeros({1}));
  count.register_attribute("kept", c10::ListType::ofTensors(),
                           c10::List<at::Tensor>{torch::zeros({1})});
  count.define(R"(
    def forward(self, x):
      self.calls = self.calls + 1
      self.sums.append(float(x.detach().sum()))
      self.total = self.total + x.detach().abs().mean()
      self.last = x.detach() * 2.0
      self.kept[0].add_(1.0)
      self.kept.append(self.last)
      y = x * self.weight * float(self.calls) + self.total
      return y + self.last.mean() + self.sums[-1] + self.kept[0]
  )");
  auto head = empty_script("Head", unit);
  head.register_parameter("weight", weight(), false);
  head.define(R"(
    def forward(self, x, wide):
      y = x * self.weight * 0.5
      if bool(wide.sum() > 0.0):
        y = y.to(dtype=7)
      return y
  )");
  auto model = empty_script("Model", unit);
  model.register_parameter("here", weight(), false);
  model.register_module("count", count);
  model.register_module("head", head);
  model.define(R"(
    def forward(self, x, wide):
      y = self.count.forward(x * self.here)
      y = self.head.forward(y, wide).to(dtype=6)
      y = self.head.forward(y, wide).to(dtype=6)
      return (y * y).mean()
  )");
  model.save(path);
}

Tensor numbers_of(size_t step) {
  return torch::linspace(-1, 1, 12).view({4, 3})
         * static_cast<double>(step + 1);
}

Tensor wide_in(size_t step) {
  return torch::full({4}, step == broken ? 1.0 : 0.0);
}

struct attributes {
  int64_t calls = 0;
  std::vector<double> sums;
  std::vector<Tensor> tensors; // total, last, and the list
};

attributes attributes_of(const Module& model) {
  torch::NoGradGuard no_grad;
  auto count = model.attr("count").toModule();
  attributes result{count.attr("calls").toInt(),
                    count.attr("sums").toDoubleVector(),
                    count.attr("kept").toTensorVector()};
  for (auto name : {"total", "last"})
    result.tensors.push_back(count.attr(name).toTensor());
  return result;
}

struct counting_run {
  std::vector<double> losses;
  std::vector<std::map<std::string, Tensor>> gradients;
  std::vector<std::string> ran_again;
  attributes end;
};

counting_run run_counting(const std::string& path) {
  counting_run result;
  run_virtual_world(2, manual_world(2, microbatches), [&](session& s) {
    distributed_model model{load_script(path)};
    for (auto name : {"count", "head"})
      set_partition(model->attr(name).toModule(), 1);
    auto train_step = step([&](Tensor x, Tensor wide) {
      auto loss = loss_of(model(x, wide));
      model.backward(loss);
      return loss.detach();
    });
    for (size_t i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      auto loss = train_step(numbers_of(i), wide_in(i)).reduce_mean();
      check_nothing_left(s);
      auto gradients = model.gradients();
      if (s.rank() != 0)
        continue;
      result.losses.push_back(loss.item<double>());
      result.gradients.emplace_back(gradients.begin(), gradients.end());
      result.ran_again.push_back(s.last_step().ran_again);
    }
    if (s.rank() == 1)
      result.end = attributes_of(*model);
  });
  return result;
}

/// The same file in one process, by LibTorch alone.
counting_run run_whole(const std::string& path) {
  counting_run result;
  torch::jit::GraphOptimizerEnabledGuard off{false};
  const auto parts = static_cast<int64_t>(microbatches);
  auto model = torch::jit::load(path);
  for (size_t i = 0; i < steps; ++i) {
    for (auto p : model.parameters())
      p.mutable_grad() = Tensor{};
    auto xs = numbers_of(i).chunk(parts);
    auto wide = wide_in(i).chunk(parts);
    auto sum = 0.0;
    for (size_t m = 0; m < xs.size(); ++m) {
      auto loss = model.forward({xs[m], wide[m]}).toTensor();
      (loss / parts).backward(); // R15
      sum += loss.item<double>() / static_cast<double>(parts);
    }
    result.losses.push_back(sum);
    auto& gradients = result.gradients.emplace_back();
    for (auto p : model.named_parameters())
      gradients.emplace(p.name, p.value.grad().clone());
  }
  result.end = attributes_of(model);
  return result;
}

bool alike(const Tensor& x, const Tensor& y) {
  return x.sizes() == y.sizes() && torch::allclose(x, y, 1e-4, 1e-5);
}

} // namespace

TEST_CASE("a TorchScript model that counts runs a step again and is right",
          "[runtime][script][fast][auto][R42]") {
  scratch_dir dir;
  const std::string path = dir.path / "counting.pt";
  write_counting(path);
  auto found = run_counting(path);
  auto right = run_whole(path);
  REQUIRE(found.losses.size() == steps);
  for (size_t i = 0; i < found.losses.size(); ++i) {
    INFO("step " << i << ": " << found.ran_again[i]);
    CHECK(found.ran_again[i].empty() == (i != broken));
    CHECK(std::abs(found.losses[i] - right.losses[i])
          < 1e-4 * (1 + std::abs(right.losses[i])));
    REQUIRE(found.gradients[i].size() == 3);
    for (auto& [name, gradient] : found.gradients[i])
      CHECK(alike(gradient, right.gradients[i].at(name)));
  }
  CHECK_THAT(found.ran_again[broken],
             ContainsSubstring("result 0 has dtype Double"));
  CHECK(found.end.calls == int64_t{steps * microbatches});
  REQUIRE(found.end.sums.size() == right.end.sums.size());
  for (size_t i = 0; i < right.end.sums.size(); ++i)
    CHECK(std::abs(found.end.sums[i] - right.end.sums[i]) < 1e-4);
  REQUIRE(found.end.tensors.size() == right.end.tensors.size());
  for (size_t i = 0; i < right.end.tensors.size(); ++i)
    CHECK(alike(found.end.tensors[i], right.end.tensors[i]));
}
