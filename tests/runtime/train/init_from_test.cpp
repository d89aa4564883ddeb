#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/session.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/trainer.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"

#include <torch/types.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// Runs that begin with the weights of a file (train.init_from).

using namespace smp;
using namespace smp::test;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

namespace {

struct init_grid {
  uint64_t pipeline = 1;
  uint64_t tensor = 1;
  uint64_t replicas = 1;
};

/// The GPT-2 of tests/data/hf and its batch as files, and the loss that
/// Hugging Face's code computed with them.
struct published_gpt {
  published_gpt() {
    named_tensors batch;
    for (auto& [name, x] :
         all_of(source_file("tests/data/hf/gpt2.safetensors")))
      if (name.starts_with("weight/"))
        weights.emplace(name.substr(7), x);
      else if (name.starts_with("input/"))
        batch.emplace_back("input" + name.substr(6), x);
      else if (name == "loss")
        loss = x.item<double>();
    write_safetensors(dir.path / "batch.safetensors", batch);
    write_safetensors(file(), {weights.begin(), weights.end()});
  }

  std::string file() const {
    return dir.path / "weights.safetensors";
  }

  train_config config(const init_grid& g = {}) const {
    train_config result;
    auto& x = result.smp;
    x.pipeline_parallel_degree = g.pipeline;
    x.tensor_parallel_degree = g.tensor;
    x.ddp = g.tensor * g.replicas > 1;
    if (g.tensor > 1) {
      x.tensor_parallel_modules = {"*"};
      x.prescaled_batch = true;
    }
    x.microbatches = g.replicas > 1 ? 1 : 2; // of two rows
    // Measured on a busy machine, so small a model may stay on one rank.
    x.trace_device = "none";
    x.threads = 1;
    result.ranks = g.pipeline * g.tensor * g.replicas;
    result.model.type = "gpt";
    result.model.layers = 2;
    result.model.heads = 2;
    result.model.width = 16;
    result.model.vocabulary = 40;
    result.model.sequence_length = 10;
    result.model.tied = true;
    result.data.type = "safetensors";
    result.data.path = dir.path / "batch.safetensors";
    result.optimizer.type = "sgd";
    result.optimizer.lr = 0.1;
    result.train.steps = 1;
    result.train.init_from = file();
    result.threads_as_ranks = true;
    return result;
  }

  scratch_dir dir;
  numbers weights;
  double loss = 0;
};

using look_at_model = std::function<void(distributed_model_base&,
                                         const distributed_optimizer&)>;

struct init_listener final : train_listener {
  void on_start(const train_start&) override {
    // nop
  }

  void on_model(distributed_model_base& model,
                distributed_optimizer& optimizer) override {
    if (look)
      look(model, optimizer);
  }

  void on_step(const step_metrics& x) override {
    losses.push_back(x.loss);
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

  look_at_model look;
  std::vector<double> losses;
};

/// @param look sees on each rank what the first step begins with
/// @returns the losses of the run's steps
std::vector<double> train_from(const train_config& config,
                               const std::filesystem::path& run_dir,
                               const look_at_model& look = {}) {
  std::filesystem::create_directory(run_dir);
  std::vector<double> result;
  virtual_world_options world;
  world.config = config.smp;
  run_virtual_world(ranks_of(config), world, [&](session& s) {
    static const std::atomic<bool> no = false;
    init_listener heard;
    heard.look = look;
    train(s, config, run_dir, heard, no);
    if (s.rank() == 0)
      result = heard.losses;
  });
  return result;
}

} // namespace

TEST_CASE("the first loss is that of the file's weights in Hugging Face's code",
          "[runtime][trainer][tensor_parallel]") {
  auto g = GENERATE(init_grid{}, init_grid{.pipeline = 2},
                    init_grid{.tensor = 2}, init_grid{.replicas = 2},
                    init_grid{.pipeline = 2, .tensor = 2});
  CAPTURE(g.pipeline, g.tensor, g.replicas);
  published_gpt gpt;
  auto losses = train_from(gpt.config(g), gpt.dir.path / "run");
  REQUIRE(losses.size() == 1);
  CHECK(losses[0] == Approx(gpt.loss).epsilon(1e-4));
}

TEST_CASE("a file of the inner model, or of a wrapped one, begins a run too",
          "[runtime][trainer]") {
  published_gpt gpt;
  auto config = gpt.config({.pipeline = 2});
  const std::string inner = "transformer.";
  named_tensors of_inner, wrapped;
  for (auto& [name, x] : gpt.weights) {
    wrapped.emplace_back("module." + name, x);
    if (name.starts_with(inner))
      of_inner.emplace_back(name.substr(inner.size()), x);
  }
  // As on the Hub: from when masks were saved.
  for (std::string layer : {"h.0.", "h.1."}) {
    of_inner.emplace_back(layer + "attn.bias", torch::ones({1, 1, 10, 10}));
    of_inner.emplace_back(layer + "attn.masked_bias", torch::tensor(-1e4));
  }
  auto begin = [&](const named_tensors& xs) {
    write_safetensors(gpt.file(), xs);
    auto run = gpt.dir.path / "run";
    std::filesystem::remove_all(run);
    return train_from(config, run).at(0);
  };
  CHECK(begin(of_inner) == Approx(gpt.loss).epsilon(1e-4));
  auto told = cause_of([&] { begin(wrapped); }, error_code::config);
  CHECK(told.ends_with("write train.init_prefix = \"module.\""));
  config.train.init_prefix = "module.";
  CHECK(begin(wrapped) == Approx(gpt.loss).epsilon(1e-4));
}

TEST_CASE("float32 weights of parameters in half precision are the file's",
          "[runtime][trainer][precision][R56][tensor_parallel]") {
  auto g = GENERATE(init_grid{.pipeline = 2}, init_grid{.tensor = 2},
                    init_grid{.replicas = 2},
                    init_grid{.tensor = 2, .replicas = 2});
  auto shards = GENERATE(false, true);
  if (shards && g.pipeline > 1)
    return; // there is one replica
  CAPTURE(g.pipeline, g.tensor, g.replicas, shards);
  published_gpt gpt;
  auto config = gpt.config(g);
  config.smp.bf16_params = true;
  config.smp.shard_optimizer_state = shards;
  size_t compared = 0;
  train_from(config, gpt.dir.path / "run", [&](auto& model, auto& optimizer) {
    assertion_lock held;
    auto& map = model.state().map();
    auto& tensors = map.model().tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      auto& name = tensors[i].names.front();
      auto wanted = gpt.weights.find(name);
      if (!map.owned(i) || wanted == gpt.weights.end())
        continue;
      INFO(name);
      auto* slice = map.slice(i);
      auto mine = slice ? slice->of(wanted->second) : wanted->second;
      CHECK(torch::equal(tensors[i].tensor, mine.to(torch::kBFloat16)));
      auto part = optimizer.part_of(tensors[i].tensor, slice);
      if (!part)
        continue;
      CHECK(part->is_master);
      CHECK(
        torch::equal(part->values, part->where ? part->where->of(mine) : mine));
      ++compared;
    }
  });
  CHECK(compared >= gpt.weights.size());
}

TEST_CASE("a run that goes on from a checkpoint does not read the file",
          "[runtime][trainer][checkpoint]") {
  published_gpt gpt;
  auto config = gpt.config({.pipeline = 2});
  config.train.steps = 2;
  auto expected = train_from(config, gpt.dir.path / "whole");
  REQUIRE(expected.size() == 2);
  config.checkpoint.dir = gpt.dir.path / "checkpoints";
  config.train.steps = 1;
  train_from(config, gpt.dir.path / "begin");
  config.train.steps = 2;
  config.train.init_from = gpt.dir.write("other", "no weights");
  auto rest = train_from(config, gpt.dir.path / "rest");
  REQUIRE(rest.size() == 1);
  CHECK(rest[0] == Approx(expected[1]).epsilon(1e-4));
  CHECK(std::abs(expected[1] - expected[0]) > 1e-3);
}

TEST_CASE("a file of another model is refused by a run and without one",
          "[runtime][trainer]") {
  published_gpt gpt;
  auto config = gpt.config({.pipeline = 2});
  CHECK_NOTHROW(plan_model(config));
  named_tensors wrong;
  for (auto& [name, x] : gpt.weights)
    if (name == "transformer.ln_f.weight")
      wrong.emplace_back("ln_f.weight", x);
    else if (name == "transformer.wpe.weight")
      wrong.emplace_back(name, torch::ones({3, 16}));
    else
      wrong.emplace_back(name, x);
  config.train.init_from = gpt.dir.path / "wrong.safetensors";
  write_safetensors(config.train.init_from, wrong);
  bool begun = false;
  auto trained = cause_of(
    [&] {
      train_from(config, gpt.dir.path / "run",
                 [&](auto&, auto&) { begun = true; });
    },
    error_code::config);
  auto planned = cause_of([&] { plan_model(config); }, error_code::config);
  CHECK_FALSE(begun);
  for (auto& told : {trained, planned}) {
    CHECK(told.starts_with("cannot load " + config.train.init_from + ": "));
    for (auto* part :
         {"1 missing ('transformer.ln_f.weight')",
          "1 not in the model ('ln_f.weight': did you mean "
          "'transformer.ln_f.weight'?)",
          "1 of another shape ('transformer.wpe.weight': [3, 16] instead of "
          "[10, 16])",
          "; nothing was loaded"})
      CHECK_THAT(told, ContainsSubstring(part));
  }
}
