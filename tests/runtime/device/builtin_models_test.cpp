// ctest: seconds=20
#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/train/metrics.hpp"
#include "runtime/train/trainer.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/tiny_models.hpp"
#include "tests/support/torch/simulated.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

// What smp-train trains, on simulated devices: the losses of the host.

using namespace smp::test;

namespace {

using smp::train_config;

struct row {
  const char* what;
  std::function<void(train_config&)> change;
  uint64_t ranks = 2;
  /// Relative. Devices compute in half precision what the host does not.
  double tolerance = 1e-5;
};

constexpr double of_half_precision = 5e-3;

train_config small(const std::string& model) {
  auto x = tiny_model(model);
  x.smp.pipeline_parallel_degree = 2;
  x.smp.trace_device = "none"; // a measured model may stay on one rank
  x.model.layers = 2;
  x.optimizer.clip_grad_norm = 0.5;
  x.train.eval_steps = 1;
  return x;
}

auto model_type(const std::string& type) {
  return [type](train_config& x) { x = small(type); };
}

/// A TorchScript file that names the host as the device of some tensors.
auto file(const std::string& name) {
  return [name](train_config& x) {
    auto path = source_file("tests/data/zoo/" + name);
    x = small("torchscript");
    x.model.path = path + ".pt";
    x.data.type = "safetensors";
    x.data.path = path + ".batch.safetensors";
    x.data.batch_size = {};
    x.data.sequence_length = 0;
  };
}

const std::vector<row> rows = {
  {"gpt", model_type("gpt")},
  {"gpt-3, whose blocks see a window", model_type("gpt-3")},
  {"moe", model_type("moe")},
  {"bert", model_type("bert")},
  {"roberta", model_type("roberta")},
  {"t5", model_type("t5")},
  {"t5, gated",
   [](train_config& x) {
     x = small("t5");
     x.model.gated = true;
   }},
  {"ncf", model_type("ncf")},
  {"mlp", model_type("mlp")},

  {"tensor parallelism",
   [](train_config& x) {
     x.smp.pipeline_parallel_degree = 1;
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
   }},
  {"tensor parallelism of stages, optimized for speed",
   [](train_config& x) {
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
     x.smp.optimize = "speed";
   },
   4},
  {"a window and tensor parallelism",
   [](train_config& x) {
     x = small("gpt-3");
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
   },
   4},
  {"t5 and tensor parallelism",
   [](train_config& x) {
     x = small("t5");
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
   },
   4},
  {"bert and tensor parallelism",
   [](train_config& x) {
     x = small("bert");
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
   },
   4},
  {"moe and tensor parallelism",
   [](train_config& x) {
     x = small("moe");
     x.smp.ddp = true;
     x.smp.tensor_parallel_degree = 2;
   },
   4},
  {"replicas", [](train_config& x) { x.smp.ddp = true; }, 4},
  {"replicas that share the optimizer's state",
   [](train_config& x) { x.smp.ddp = x.smp.shard_optimizer_state = true; }, 4},
  {"replicas that share gradients",
   [](train_config& x) {
     x.smp.ddp = x.smp.shard_optimizer_state = x.smp.shard_gradients = true;
   },
   4},
  {"bfloat16 parameters", [](train_config& x) { x.smp.bf16_params = true; }, 2,
   of_half_precision},
  {"float16 parameters, scaled by what fits",
   [](train_config& x) { x.smp.fp16_params = true; }, 2, of_half_precision},
  {"float16 parameters of replicas that share the optimizer's state",
   [](train_config& x) {
     x.smp.fp16_params = true;
     x.smp.ddp = x.smp.shard_optimizer_state = true;
   },
   4, of_half_precision},
  {"a fixed scale",
   [](train_config& x) { x.optimizer.loss_scale = {.fixed = 64}; }},
  {"autocast to bfloat16", [](train_config& x) { x.train.dtype = "bfloat16"; },
   2, of_half_precision},
  {"autocast to float16", [](train_config& x) { x.train.dtype = "float16"; }, 2,
   of_half_precision},
  {"activation checkpointing",
   [](train_config& x) {
     x.smp.activation_checkpointing.modules = {"transformer.h.*"};
   }},
  {"averages of weights",
   [](train_config& x) {
     x.optimizer.ema_decay = 0.9;
     x.train.save_model = true;
   }},
  {"sgd",
   [](train_config& x) {
     x.optimizer.type = "sgd";
     x.optimizer.momentum = 0.9;
   }},
  {"adam", [](train_config& x) { x.optimizer.type = "adam"; }},
  {"adagrad", [](train_config& x) { x.optimizer.type = "adagrad"; }},
  {"adamw, fused", [](train_config& x) { x.optimizer.fused = true; }},
  {"static mode",
   [](train_config& x) {
     x.smp.static_mode = true;
     x.smp.static_steps = 2;
     x.train.steps = 5;
   }},
  {"no fast mode", [](train_config& x) { x.smp.fast_mode = false; }},
  {"simple", [](train_config& x) { x.smp.pipeline = "simple"; }},

  {"gpt in TorchScript", file("gpt")},
  {"bert in TorchScript", file("bert")},
  {"a published gpt2", file("hf_gpt2")},
  {"a published llama", file("hf_llama")},
  {"a published t5", file("hf_t5")},
  {"a published bert", file("hf_bert")},
  {"a convnet in TorchScript", file("convnet")},
  {"a mixture of experts in TorchScript", file("experts")},
};

struct numbers_of_run : smp::train_listener {
  void on_start(const smp::train_start&) override {
    // nop
  }

  void on_step(const smp::step_metrics& x) override {
    found.push_back(x.loss);
    found.push_back(x.grad_norm);
  }

  void on_evaluation(uint64_t, double loss) override {
    found.push_back(loss);
  }

  std::vector<double> found;
};

struct outcome {
  std::vector<double> numbers;
  std::string sample;
};

/// Trains on virtual ranks. @returns losses, norms and what was sampled
outcome trained(train_config config, const row& x, const std::string& device,
                const std::string& run_dir) {
  config.smp.device = device;
  std::vector<numbers_of_run> heard(x.ranks);
  outcome result;
  const std::atomic<bool> stop = false;
  smp::virtual_world_options world;
  world.config = config.smp;
  smp::run_virtual_world(x.ranks, world, [&](smp::session& s) {
    auto& mine = heard[s.rank()];
    auto summary = smp::train(s, config, run_dir, mine, stop);
    if (s.rank() == 0)
      result = {mine.found, summary.sample};
  });
  return result;
}

bool close(const std::vector<double>& xs, const std::vector<double>& ys,
           double tolerance = 1e-5) {
  return std::ranges::equal(xs, ys, [tolerance](double x, double y) {
    return std::abs(x - y) <= tolerance * std::max(1.0, std::abs(x));
  });
}

std::string race() {
  return smp::sim::races_found() > 0 ? smp::sim::last_race() : "";
}

} // namespace

TEST_CASE("on devices smp-train has the losses of the host",
          "[runtime][device][train]") {
  auto x = GENERATE(from_range(rows));
  INFO(x.what);
  auto config = small("gpt");
  x.change(config);
  scratch_dir dir;
  auto host = trained(config, x, "cpu", dir.path);
  smp::sim::changed_options options{strict_devices(10)};
  smp::sim::forget_races();
  auto device = trained(config, x, "sim", dir.path);
  INFO(fmt::format("{}\n{}", fmt::join(host.numbers, " "),
                   fmt::join(device.numbers, " ")));
  CHECK(close(host.numbers, device.numbers, x.tolerance));
  CHECK(host.sample == device.sample);
  CHECK(race() == "");
}

TEST_CASE("a sample is drawn from the logits of a device",
          "[runtime][device][train]") {
  scratch_dir dir;
  auto config = small("gpt");
  std::string text;
  for (int i = 0; i < 40; ++i)
    text += "light is refracted " + std::to_string(i * i) + " times\n";
  config.data.type = "text";
  config.data.path = dir.write("text.txt", text);
  config.model.vocabulary = {};
  config.train.sample = 12;
  const row x{"", {}};
  auto host = trained(config, x, "cpu", dir.path);
  smp::sim::changed_options options{strict_devices(10)};
  auto device = trained(config, x, "sim", dir.path);
  CHECK(host.sample.size() == 12);
  CHECK(host.sample == device.sample);
}

TEST_CASE("a run goes on from host to device and back",
          "[runtime][device][train]") {
  scratch_dir dir;
  auto change = GENERATE(
    as<void (*)(train_config&)>{},
    [](train_config& x) { x.smp.bf16_params = true; },
    [](train_config& x) { x.optimizer.type = "adagrad"; });
  auto config = small("gpt");
  change(config);
  config.optimizer.ema_decay = 0.9;
  config.train.save_model = true;
  config.train.steps = 3;
  const row x{"", {}};
  auto host = trained(config, x, "cpu", dir.path);
  smp::sim::changed_options options{strict_devices(10)};
  smp::sim::forget_races();
  config.checkpoint.dir = dir.path / "checkpoints";
  std::vector<double> found;
  for (uint64_t i = 1; i <= 3; ++i) {
    config.train.steps = i;
    auto part = trained(config, x, i == 2 ? "sim" : "cpu", dir.path);
    found.insert(found.end(), part.numbers.begin(), part.numbers.begin() + 2);
    if (i == 3)
      found.push_back(part.numbers.back());
  }
  CHECK(close(host.numbers, found, of_half_precision));
  CHECK(race() == "");
}

TEST_CASE("autocast is on where a rank computes", "[runtime][device][train]") {
  smp::virtual_world_options world;
  world.config.device = "sim";
  smp::run_virtual_world(1, world, [](smp::session& s) {
    auto x = torch::ones({2, 2});
    auto y = x.to(s.internals().device());
    smp::autocast on{torch::kBFloat16};
    assertion_lock lock;
    CHECK(x.mm(x).scalar_type() == torch::kBFloat16);
    CHECK(y.mm(y).scalar_type() == torch::kBFloat16);
  });
}
