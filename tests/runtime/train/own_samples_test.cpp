#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/data/batch_numbers.hpp"
#include "runtime/session/session.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

// Runs on samples of the user's (data.type = "safetensors" with
// data.batch_size).

using namespace smp;
using namespace smp::test;
using Catch::Approx;

namespace {

/// 20 samples, of which the last 4 are held out; a step takes 8.
constexpr int64_t all_rows = 20, training_rows = 16, rows_of_step = 8;

struct sample_dir : scratch_dir {
  sample_dir() {
    torch::manual_seed(3);
    vectors = torch::randn({all_rows, 6});
    classes = torch::randint(3, {all_rows}, torch::kLong);
    write_safetensors(path / "x.safetensors",
                      {{"input0", vectors}, {"input1", classes}});
  }

  void use_in(train_config& x, uint64_t replicas) const {
    x.smp.pipeline_parallel_degree = 1;
    x.smp.ddp = replicas > 1;
    x.ranks = replicas;
    x.smp.microbatches = 2;
    x.smp.threads = 1;
    x.model.type = "mlp";
    x.model.layers = 3;
    x.model.width = 8;
    x.model.inputs = 6;
    x.model.outputs = 3;
    x.data.type = "safetensors";
    x.data.path = path / "x.safetensors";
    x.data.sequence_length = 0;
    x.data.batch_size = rows_of_step / replicas;
    x.data.held_out = 0.2;
    x.data.shuffle_seed = 9;
    x.optimizer.type = "sgd";
    x.optimizer.lr = 0.2;
    x.train.steps = 7;
    x.train.eval_steps = 1;
    x.threads_as_ranks = true;
  }

  train_config config(uint64_t replicas) const {
    train_config result;
    use_in(result, replicas);
    return result;
  }

  torch::Tensor vectors, classes;
};

struct sample_listener final : train_listener {
  void on_start(const train_start&) override {
    // nop
  }

  void on_step(const step_metrics& x) override {
    losses.push_back(x.loss);
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

  std::vector<double> losses;
};

struct sample_run {
  std::vector<double> losses;
  std::optional<double> held_out_loss;
};

/// Trains on virtual ranks.
sample_run train_on(const train_config& config,
                    const std::filesystem::path& run_dir) {
  std::filesystem::create_directory(run_dir);
  sample_run result;
  virtual_world_options world;
  world.config = config.smp;
  run_virtual_world(ranks_of(config), world, [&](session& s) {
    static const std::atomic<bool> no = false;
    sample_listener heard;
    auto summary = train(s, config, run_dir, heard, no);
    if (s.rank() == 0)
      result = {heard.losses, summary.held_out_loss};
  });
  return result;
}

void check_losses(const std::vector<double>& found,
                  const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(found[i] == Approx(expected[i]).epsilon(1e-4));
  }
}

} // namespace

TEST_CASE("Replicas train on a user's samples as a plain loop does",
          "[runtime][trainer]") {
  const uint64_t replicas = GENERATE(1, 2);
  CAPTURE(replicas);
  sample_dir dir;
  auto config = dir.config(replicas);
  config.train.save_model = true;
  auto run = train_on(config, dir.path / "run");

  // The same with torch alone, on rows of tensors that no file was read for.
  auto model = make_trainable(config);
  auto parameters = model->named_parameters();
  std::vector<torch::Tensor> values;
  for (auto& [name, x] : parameters)
    values.push_back(x);
  torch::optim::SGD sgd{values, 0.2};
  std::vector<double> expected;
  for (uint64_t step = 0; step < config.train.steps; ++step) {
    auto rows = shuffled_rows(9, step * rows_of_step, rows_of_step,
                              training_rows);
    auto index = torch::tensor(std::vector<int64_t>{rows.begin(), rows.end()});
    sgd.zero_grad();
    auto loss = model->loss(
      {dir.vectors.index_select(0, index), dir.classes.index_select(0, index)});
    loss.backward();
    sgd.step();
    expected.push_back(loss.item<double>());
  }
  check_losses(run.losses, expected);
  // A batch has each of the held-out samples twice.
  torch::NoGradGuard no_grad;
  auto held_out = model->loss(
    {dir.vectors.narrow(0, training_rows, all_rows - training_rows),
     dir.classes.narrow(0, training_rows, all_rows - training_rows)});
  REQUIRE(run.held_out_loss);
  CHECK(*run.held_out_loss == Approx(held_out.item<double>()).epsilon(1e-4));
  check_near(all_of(dir.path / "run/model.safetensors"),
             {parameters.begin(), parameters.end()}, {1e-4, 1e-6});
}

TEST_CASE("A run that goes on takes the samples that come next, in any grid",
          "[runtime][trainer][checkpoint]") {
  // Three steps end in the middle of a pass.
  sample_dir dir;
  auto whole = train_on(dir.config(1), dir.path / "whole");
  auto checkpoints = dir.path / "checkpoints";
  auto first = dir.config(2);
  first.train.steps = 3;
  first.checkpoint.dir = checkpoints;
  auto found = train_on(first, dir.path / "first").losses;
  auto rest = dir.config(1);
  rest.checkpoint.dir = checkpoints;
  auto more = train_on(rest, dir.path / "rest").losses;
  CHECK(found.size() == 3);
  found.insert(found.end(), more.begin(), more.end());
  check_losses(found, whole.losses);
}

TEST_CASE("A comparison with one process takes the same samples",
          "[runtime][verify]") {
  const uint64_t pipeline = GENERATE(1, 2);
  CAPTURE(pipeline);
  sample_dir dir;
  auto x = gpt_case(pipeline, "interleaved", 2);
  dir.use_in(x.config, 2);
  x.config.smp.pipeline_parallel_degree = pipeline;
  x.config.ranks = 2 * pipeline;
  CHECK(to_text(run_case(x, 5)).starts_with("equal: 5 steps"));
}
