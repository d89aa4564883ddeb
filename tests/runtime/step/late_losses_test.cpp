// ctest: seconds=81 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/script_runs.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Losses of models whose ranks never make the logits: no call observer, which
// would read them, looks on.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Equals;

namespace {

constexpr int steps = 5;

struct grid {
  uint64_t tp, pp, dp;
  bool prescaled = false;
  std::string optimize = "memory";
};

virtual_world_options world_of(const grid& x) {
  virtual_world_options result;
  auto& cfg = result.config;
  cfg.tensor_parallel_degree = x.tp;
  cfg.pipeline_parallel_degree = x.pp;
  cfg.tensor_parallel_modules = {"*"};
  cfg.prescaled_batch = x.prescaled;
  cfg.optimize = x.optimize;
  cfg.microbatches = 2;
  cfg.ddp = true;
  cfg.threads = 1;
  cfg.trace_device = "none";
  result.reorder = true;
  return result;
}

/// What a step began with and what it found.
struct seen_step {
  numbers before, gradients;
  double loss = 0; // the mean over all samples
};

/// Trains with SGD.
/// @returns what rank 0 saw
std::vector<seen_step> train(const script_job& job, const grid& shape) {
  std::vector<seen_step> result(steps);
  std::string text;
  std::mutex mutex;
  auto ranks = shape.tp * shape.pp * shape.dp;
  run_virtual_world(ranks, world_of(shape), [&](session& s) {
    distributed_model model{load_script(job.path)};
    std::vector<Tensor> parameters;
    for (const auto& p : (*model).parameters())
      parameters.push_back(p);
    torch::optim::SGD sgd{parameters, torch::optim::SGDOptions(0.1)};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](std::vector<Tensor> batch) {
      auto loss = loss_of(model.run("forward", {batch.begin(), batch.end()}));
      model.backward(loss);
      return loss.detach();
    });
    std::vector<Tensor> mine;
    for (auto& x : job.batch(0))
      mine.push_back(
        x.chunk(static_cast<int64_t>(data_size())).at(data_rank()));
    for (auto& seen : result) {
      auto before = model.state_dict();
      optimizer.zero_grad();
      auto loss = train_step(mine).reduce_mean();
      auto gradients = model.gradients();
      optimizer.step();
      std::lock_guard guard{mutex};
      seen.loss += loss.item<double>() / static_cast<double>(ranks);
      if (s.rank() != 0)
        continue;
      seen.before = {before.begin(), before.end()};
      seen.gradients = {gradients.begin(), gradients.end()};
    }
    if (s.rank() == 0)
      text = model.partition_text();
  });
  CHECK_THAT(text, ContainsSubstring("LMHead shared by"));
  return result;
}

/// The same of the whole batch in one process, by LibTorch alone.
seen_step of_file(const script_job& job, const numbers& before) {
  torch::jit::GraphOptimizerEnabledGuard off{false};
  auto model = torch::jit::load(job.path);
  std::map<const void*, std::string> names; // the first of tied ones
  {
    torch::NoGradGuard no_grad;
    for (const auto& x : model.named_parameters(true))
      if (names.emplace(x.value.unsafeGetTensorImpl(), x.name).second)
        x.value.copy_(before.at(x.name));
  }
  std::vector<c10::IValue> inputs;
  for (auto& x : job.batch(0))
    inputs.emplace_back(x);
  auto loss = loss_of(model.forward(inputs));
  loss.backward();
  seen_step result;
  result.loss = loss.item<double>();
  for (const auto& x : model.named_parameters(true))
    if (names.at(x.value.unsafeGetTensorImpl()) == x.name)
      result.gradients.emplace(x.name, x.value.grad());
  return result;
}

/// A last layer with the weight of a table.
struct tied_linear_impl : torch::nn::LinearImpl {
  explicit tied_linear_impl(const Tensor& table)
    : LinearImpl(
      torch::nn::LinearOptions(table.size(1), table.size(0)).bias(false)) {
    parameters_["weight"] = weight = table;
  }
};
TORCH_MODULE_IMPL(tied_linear, tied_linear_impl);

[[maybe_unused]] const bool registered = tp_register<tied_linear_impl>(
  "Linear");

/// On the last rank of the pipeline; `note` gets the logits.
struct noted_head_impl : torch::nn::Module {
  using noted = std::function<Tensor(const Tensor& logits, const Tensor& y)>;

  explicit noted_head_impl(noted f) : head(table->weight), note(std::move(f)) {
    register_module("table", table);
    register_module("head", head);
  }

  Tensor forward(Tensor x, Tensor y) {
    return note(head(table(x)), y);
  }

  submodule<torch::nn::Embedding> table{8, 4};
  submodule<tied_linear> head;
  noted note;
};
TORCH_MODULE_IMPL(noted_head, noted_head_impl);

struct head_model_impl : torch::nn::Module {
  explicit head_model_impl(noted_head_impl::noted f) : last(std::move(f)) {
    register_module("last", last);
  }

  Tensor forward(Tensor x, Tensor y) {
    return last(x, y);
  }

  submodule<noted_head> last;
};
TORCH_MODULE_IMPL(head_model, head_model_impl);

Tensor labels() {
  return torch::tensor({1, 2, 3});
}

/// Takes a step on two ranks that share the words, for each of `pipeline`
/// ranks.
/// @param expected checks the error of each rank, or "no error"
template <class Matcher>
void run_head(uint64_t pipeline, const noted_head_impl::noted& f,
              const Matcher& expected) {
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.pipeline_parallel_degree = pipeline;
  world.config.tensor_parallel_modules = {"last"};
  world.config.auto_partition = false;
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2 * pipeline, world, [&](session&) {
    distributed_model model{seeded([&] { return head_model{f}; })};
    set_partition(*model->last, static_cast<uint32_t>(pipeline - 1));
    auto train_step = step([&](Tensor x, Tensor y) {
      auto result = model(x, y);
      auto seed = result.dim() > 0 ? torch::ones_like(result) : Tensor{};
      model.backward(result, seed);
      return result.detach();
    });
    auto x = labels() + static_cast<int64_t>(tp_rank());
    auto why = error_of([&] { train_step(x, labels()); });
    auto text = model.partition_text();
    assertion_lock held;
    CHECK_THAT(why, expected);
    CHECK_THAT(text, ContainsSubstring("LMHead shared by 2 ranks by words: "
                                       "last.head"));
  });
}

} // namespace

TEST_CASE("files whose words are shared train as one process does",
          "[runtime][tensor_parallel][R35][R64]") {
  const std::string file = GENERATE("hf_gpt2", "hf_bert", "hf_roberta",
                                    "hf_llama", "hf_t5");
  const auto shape = GENERATE(
    grid{2, 1, 1}, grid{4, 1, 1}, grid{2, 2, 1}, grid{2, 1, 2}, grid{2, 2, 2},
    grid{2, 1, 1, true}, grid{2, 2, 2, true}, grid{2, 2, 1, false, "speed"});
  CAPTURE(file, shape.tp, shape.pp, shape.dp, shape.prescaled, shape.optimize);
  const auto job = zoo_job(file);
  auto seen = train(job, shape);
  for (size_t i = 0; i < seen.size(); ++i) {
    CAPTURE(i);
    // Each step begins with the parameters that the ranks had.
    auto expected = of_file(job, seen[i].before);
    check_near(seen[i].gradients, expected.gradients, {.least = 1e-6});
    CHECK(seen[i].loss == Catch::Approx(expected.loss).epsilon(1e-5));
  }
}

TEST_CASE("logits that the last module stored are there after the step",
          "[runtime][tensor_parallel][R64]") {
  uint64_t pipeline = GENERATE(1, 2);
  CAPTURE(pipeline);
  std::vector<Tensor> kept(2);
  run_head(
    pipeline,
    [&](const Tensor& x, const Tensor& y) {
      kept.at(tp_rank()) = x;
      return torch::nn::functional::cross_entropy(x, y);
    },
    Equals("no error"));
  auto weight = seeded([] { return torch::randn({8, 4}); });
  for (size_t i = 0; i < kept.size(); ++i) {
    auto hidden = weight.index_select(0, labels() + static_cast<int64_t>(i));
    CHECK(torch::allclose(kept[i], torch::linear(hidden, weight)));
  }
}

TEST_CASE("backward may begin with logits that nobody read",
          "[runtime][tensor_parallel][R64]") {
  run_head(
    1, [](const Tensor& x, const Tensor&) { return x; }, Equals("no error"));
}

TEST_CASE("logits that only one rank reads are an error that names the layer",
          "[runtime][tensor_parallel][R31][R64]") {
  run_head(
    1,
    [](const Tensor& x, const Tensor& y) {
      if (tp_rank() == 0)
        x.argmax(-1);
      return torch::nn::functional::cross_entropy(x, y);
    },
    ContainsSubstring("last.head"));
}
