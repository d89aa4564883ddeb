#include "tests/support/catch.hpp"

#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/script_runs.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// What code and configuration say of single modules of a TorchScript file that
// tensor-parallel ranks share.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using torch::jit::Module;

const std::string blocks = "model.transformer.h";
constexpr int64_t width = 12; // of the exported GPT-2, which has three blocks
constexpr int64_t inner = 24;
constexpr int64_t words = 29; // of all files of Hugging Face here

Module part_of(const Module& model, const std::string& name) {
  for (const auto& x : model.named_modules())
    if (x.name == name)
      return x.value;
  throw std::runtime_error{"no module " + name};
}

/// Of the file in one process, by LibTorch alone.
numbers gradients_alone(const script_job& job) {
  torch::jit::GraphOptimizerEnabledGuard off{false};
  auto model = torch::jit::load(job.path);
  std::vector<c10::IValue> inputs;
  for (auto& x : job.batch(0))
    inputs.emplace_back(x);
  loss_of(model.forward(inputs)).backward();
  numbers result;
  std::set<const void*> seen; // tied ones stand under their first name
  for (const auto& x : model.named_parameters(true))
    if (seen.insert(x.value.unsafeGetTensorImpl()).second)
      result.emplace(x.name, x.value.grad());
  return result;
}

struct shared_run {
  std::string text; // the partition print
  /// How many numbers of each parameter a rank holds.
  std::array<std::map<std::string, int64_t>, 2> held;
  std::string refusal; // of what comes after the partition
};

/// Trains as one process does.
/// @param mark is called on rank 0 only, which decides for all
/// @param modules that the configuration names
shared_run train(const std::function<void(const Module&)>& mark,
                 const std::vector<std::string>& modules) {
  const auto job = zoo_job("hf_gpt2");
  const auto expected = gradients_alone(job);
  shared_run result;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = modules;
  world.config.ddp = true;
  world.config.threads = 1;
  world.reorder = true;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{load_script(job.path)};
    if (s.rank() == 0)
      mark(*model);
    auto train_step = step([&](std::vector<Tensor> batch) {
      auto loss = loss_of(model.run("forward", {batch.begin(), batch.end()}));
      model.backward(loss);
      return loss.detach();
    });
    std::vector<Tensor> mine;
    for (auto& x : job.batch(0))
      mine.push_back(x.chunk(2).at(dp_rank()));
    train_step(mine);
    auto gradients = model.gradients();
    auto first = part_of(*model, blocks + ".0");
    auto refusal = error_of([&] { set_tensor_parallelism(first, false); },
                            error_code::unsupported);
    assertion_lock held;
    check_near({gradients.begin(), gradients.end()}, expected, {.least = 1e-6});
    for (auto& [name, x] : model.local_named_parameters())
      result.held.at(s.rank()).emplace(name, x.numel());
    if (s.rank() != 0)
      return;
    result.text = model.partition_text();
    result.refusal = refusal;
  });
  return result;
}

/// How many numbers both ranks hold of a weight of a block.
std::pair<int64_t, int64_t> held(const shared_run& x, int block,
                                 const std::string& weight) {
  auto name = blocks + "." + std::to_string(block) + "." + weight + ".weight";
  return {x.held[0].at(name), x.held[1].at(name)};
}

std::pair<int64_t, int64_t> each(int64_t numbers) {
  return {numbers, numbers};
}

/// How often operations of LibTorch are called, on all threads.
class counted_calls {
public:
  counted_calls() {
    calls().clear();
    handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& x) {
        std::lock_guard guard{mutex()};
        ++calls()[x.name()];
        return std::unique_ptr<at::ObserverContext>{};
      }));
  }

  ~counted_calls() {
    at::removeCallback(handle_);
  }

  int of(const std::string& name) const {
    std::lock_guard guard{mutex()};
    return calls()[name];
  }

private:
  static std::mutex& mutex() {
    static std::mutex result;
    return result;
  }

  static std::map<std::string, int>& calls() {
    static std::map<std::string, int> result;
    return result;
  }

  at::CallbackHandle handle_;
};

constexpr int64_t square = width * width; // attn.c_proj
constexpr int64_t wide = width * inner;   // mlp.c_fc, mlp.c_proj

} // namespace

TEST_CASE("code says of each layer of a file how it is shared, and if at all",
          "[runtime][tensor_parallel][R50]") {
  auto x = train(
    [](const Module& model) {
      set_tensor_parallelism(part_of(model, blocks + ".0"), false);
      set_tensor_parallelism(part_of(model, blocks + ".1"), true,
                             {.optimize = "speed"});
    },
    {blocks});
  CAPTURE(x.text);
  CHECK_THAT(x.text,
             ContainsSubstring("TransformerLayer shared by 2 ranks for speed: "
                               "model.transformer.h.1\n")
               && ContainsSubstring("TransformerLayer shared by 2 ranks for "
                                    "memory: model.transformer.h.2\n")
               && !ContainsSubstring(": model.transformer.h.0"));
  CHECK(held(x, 0, "attn.c_proj") == each(square));
  CHECK(held(x, 0, "mlp.c_fc") == each(wide));
  for (auto block : {1, 2}) {
    CAPTURE(block);
    CHECK(held(x, block, "attn.c_proj") == each(square / 2));
    CHECK(held(x, block, "mlp.c_fc") == each(wide / 2));
  }
  CHECK(x.refusal
        == "module model.transformer.h.0: smp::set_tensor_parallelism has no "
           "effect once the model is partitioned: call it before the first "
           "step, and before the model's partition()");
}

TEST_CASE("code names modules of a file that a configuration does not",
          "[runtime][tensor_parallel]") {
  auto x = train(
    [](const Module& model) {
      set_tensor_parallelism(part_of(model, blocks + ".1.mlp.c_fc"));
    },
    {});
  CAPTURE(x.text);
  CHECK(held(x, 1, "mlp.c_fc") == each(wide / 2));
  CHECK(held(x, 1, "attn.c_proj") == each(square));
  CHECK(held(x, 0, "mlp.c_fc") == each(wide));
}

TEST_CASE(
  "the parts of a layer of a file are shared except for an excluded one",
  "[runtime][tensor_parallel]") {
  auto by_code = GENERATE(true, false);
  CAPTURE(by_code);
  const auto part = blocks + ".1.mlp.c_fc";
  std::vector<std::string> modules{blocks + ".*"};
  if (!by_code)
    modules.push_back("!" + part);
  auto x = train(
    [&](const Module& model) {
      if (by_code)
        set_tensor_parallelism(part_of(model, part), false);
    },
    modules);
  CAPTURE(x.text);
  CHECK(held(x, 1, "mlp.c_fc") == each(wide));
  CHECK(held(x, 1, "mlp.c_proj") == each(wide / 2));
  CHECK(held(x, 1, "attn.c_proj") == each(square / 2));
  CHECK(held(x, 0, "mlp.c_fc") == each(wide / 2));
  CHECK_THAT(x.text, !ContainsSubstring("model.transformer.h.0, "
                                        "model.transformer.h.1"));
}

TEST_CASE("the last layer of a file is shared by words with its table",
          "[runtime][tensor_parallel][R59]") {
  auto modules = GENERATE(
    std::vector<std::string>{"*"},
    std::vector<std::string>{"model.transformer.wte", "model.lm_head"});
  auto x = train([](const Module&) {}, modules);
  CHECK_THAT(x.text,
             ContainsSubstring("Embedding shared by 2 ranks by rows: "
                               "model.transformer.wte")
               && ContainsSubstring("LMHead shared by 2 ranks by words: "
                                    "model.lm_head"));
  const auto table = "model.transformer.wte.weight";
  CHECK(x.held[0].at(table) == 15 * width);
  CHECK(x.held[1].at(table) == (words - 15) * width);
}

TEST_CASE("no rank has the logits of a file whose words are shared",
          "[runtime][tensor_parallel][R59][R64]") {
  const std::string file = GENERATE("hf_gpt2", "hf_bert", "hf_roberta",
                                    "hf_llama", "hf_t5");
  CAPTURE(file);
  const auto job = zoo_job(file);
  counted_calls calls;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"*"};
  world.config.microbatches = 2;
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{load_script(job.path)};
    auto train_step = step([&](std::vector<Tensor> batch) {
      auto loss = loss_of(model.run("forward", {batch.begin(), batch.end()}));
      model.backward(loss);
      return loss.detach();
    });
    std::vector<Tensor> mine;
    for (auto& x : job.batch(0))
      mine.push_back(x.chunk(2).at(dp_rank()));
    for (int i = 0; i < 4; ++i) // TorchScript optimises what it has seen
      train_step(mine);
    if (s.rank() != 0)
      return;
    auto text = model.partition_text();
    assertion_lock held;
    CHECK_THAT(text, ContainsSubstring("LMHead shared by 2 ranks by words"));
  });
  CHECK(calls.of("aten::cross_entropy_loss") > 0);
  CHECK(calls.of("aten::_log_softmax") == 0);
}

TEST_CASE("a configuration leaves a layer of a file out",
          "[runtime][tensor_parallel]") {
  auto x = train([](const Module&) {}, {blocks, "!" + blocks + ".0"});
  CAPTURE(x.text);
  CHECK(held(x, 0, "mlp.c_fc") == each(wide));
  CHECK(held(x, 1, "mlp.c_fc") == each(wide / 2));
  CHECK(held(x, 2, "attn.c_proj") == each(square / 2));
}
