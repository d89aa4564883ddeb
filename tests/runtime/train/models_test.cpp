#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/session/session.hpp"
#include "runtime/train/metrics.hpp"
#include "runtime/train/models/builtin.hpp"
#include "runtime/train/models/synthetic.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/tiny_models.hpp"
#include "tests/support/torch/plain_gpt.hpp"

#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

using namespace smp::test;

namespace {

const std::vector<std::string> all_models = {"gpt",     "gpt-3", "moe", "bert",
                                             "roberta", "t5",    "ncf", "mlp"};

struct silent : smp::train_listener {
  void on_start(const smp::train_start&) override {
    // nop
  }

  void on_step(const smp::step_metrics& x) override {
    losses.push_back(x.loss);
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

  std::vector<double> losses;
};

/// Trains on virtual ranks. @returns the losses
std::vector<double> losses_of(const smp::train_config& config,
                              const std::string& run_dir) {
  const auto ranks = config.smp.pipeline_parallel_degree;
  std::vector<silent> heard(ranks);
  const std::atomic<bool> stop = false;
  smp::virtual_world_options world;
  world.config = config.smp;
  smp::run_virtual_world(ranks, world, [&](smp::session& s) {
    smp::train(s, config, run_dir, heard[s.rank()], stop);
  });
  return heard[0].losses;
}

/// Loss and gradients of the first step, by the model alone.
double plain_step(const smp::train_config& config, smp::trainable& model) {
  auto data = smp::make_data(config);
  auto xs = data->training_batch(0);
  double sum = 0;
  const auto m = static_cast<int64_t>(config.smp.microbatches);
  for (int64_t k = 0; k < m; ++k) {
    smp::batch part;
    for (auto& x : xs)
      part.push_back(x.chunk(m)[k]);
    auto loss = model.loss(part) / static_cast<double>(m);
    loss.backward();
    sum += loss.item<double>();
  }
  return sum;
}

} // namespace

TEST_CASE(
  "Every model has the loss and the gradients of one process on two "
  "and on four ranks",
  "[runtime][models]") {
  auto name = GENERATE(from_range(all_models));
  auto ranks = GENERATE(1, 2, 4);
  CAPTURE(name, ranks);
  scratch_dir dir;
  auto config = tiny_model(name);
  config.smp.pipeline_parallel_degree = static_cast<uint64_t>(ranks);
  config.train.steps = 1;
  config.train.dump_gradients = {1};
  config.train.save_model = true;
  config.optimizer.clip_grad_norm = 0.1; // what is dumped is not clipped
  auto losses = losses_of(config, dir.path);

  auto model = smp::make_trainable(config);
  auto loss = plain_step(config, *model);
  REQUIRE(losses.size() == 1);
  CHECK(std::abs(losses[0] - loss) <= 1e-5 * std::abs(loss) + 1e-7);
  auto found = smp::read_safetensors(dir.path / "gradients-1.safetensors");
  std::set<std::string> names;
  for (auto& [parameter, x] : model->named_parameters()) {
    INFO(parameter);
    names.insert(parameter);
    auto* gradient = found.find(parameter);
    REQUIRE((gradient != nullptr) == x.grad().defined());
    if (gradient != nullptr)
      CHECK(excess(*gradient, x.grad()) <= 0);
  }
  // A tied weight stands once, in both files.
  for (auto& [parameter, x] : found.tensors)
    CHECK(names.contains(parameter));
  std::set<std::string> saved;
  for (auto& [parameter, x] :
       smp::read_safetensors(dir.path / "model.safetensors").tensors)
    saved.insert(parameter);
  CHECK(saved == names);
}

TEST_CASE("Every model learns its synthetic data on one and on two ranks",
          "[runtime][models]") {
  auto name = GENERATE(from_range(all_models));
  auto ranks = GENERATE(1, 2);
  CAPTURE(name, ranks);
  scratch_dir dir;
  auto config = tiny_model(name);
  config.smp.pipeline_parallel_degree = static_cast<uint64_t>(ranks);
  config.model.vocabulary = 8; // strides of a GPT's data are soon learnt
  config.data.batch_size = 16;
  config.train.steps = 30;
  auto losses = losses_of(config, dir.path);
  auto mean_of = [&](size_t begin) {
    double sum = 0;
    for (auto i = begin; i < begin + 5; ++i)
      sum += losses.at(i);
    return sum / 5;
  };
  CAPTURE(losses);
  CHECK(mean_of(25) < 0.97 * mean_of(0));
}

TEST_CASE(
  "Every model trains with parameters of half precision as with "
  "float32",
  "[runtime][models][precision]") {
  auto name = GENERATE(from_range(all_models));
  auto ranks = GENERATE(1, 2);
  CAPTURE(name, ranks);
  scratch_dir dir;
  auto config = tiny_model(name);
  config.smp.pipeline_parallel_degree = static_cast<uint64_t>(ranks);
  config.train.steps = 3;
  auto expected = losses_of(config, dir.path);
  config.smp.bf16_params = true;
  auto found = losses_of(config, dir.path);
  CAPTURE(expected, found);
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    CHECK(std::abs(found[i] - expected[i]) < 0.05 * (1 + expected[i]));
}

TEST_CASE("Synthetic batches are functions of seed and step",
          "[runtime][models]") {
  auto name = GENERATE(from_range(all_models));
  CAPTURE(name);
  auto equal = [](const smp::batch& a, const smp::batch& b) {
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i)
      if (!torch::equal(a[i], b[i]))
        return false;
    return true;
  };
  auto config = tiny_model(name);
  auto a = smp::make_data(config);
  auto b = smp::make_data(config);
  CHECK(a->batch_size() == 8);
  a->training_batch(0); // an earlier batch changes nothing
  CHECK(equal(a->training_batch(3), b->training_batch(3)));
  CHECK_FALSE(equal(a->training_batch(3), a->training_batch(4)));
  CHECK_FALSE(equal(a->training_batch(0), a->held_out_batch(0, 1)));
  config.data.shuffle_seed = 2;
  CHECK_FALSE(
    equal(a->training_batch(3), smp::make_data(config)->training_batch(3)));
}

TEST_CASE("Next tokens walk with one stride per sequence, in parts, too",
          "[runtime][models]") {
  auto config = tiny_model("gpt");
  auto data = smp::make_data(config);
  auto xs = data->training_batch(2);
  auto &input = xs.at(0), &target = xs.at(1);
  REQUIRE(input.sizes() == torch::IntArrayRef{8, 8});
  CHECK(torch::equal(input.slice(1, 1), target.slice(1, 0, 7)));
  CHECK(input.min().item<int64_t>() >= 0);
  CHECK(input.max().item<int64_t>() < 24);
  auto strides = torch::remainder(target - input, 24);
  CHECK(torch::equal(strides, strides.slice(1, 0, 1).expand({8, 8})));
  for (uint64_t i = 0; i < 4; ++i)
    CHECK(torch::equal(data->training_batch(2, {i, 4})[1],
                       target.slice(0, 2 * static_cast<int64_t>(i),
                                    2 * static_cast<int64_t>(i) + 2)));
  config.data.batch_size = 0;
  CHECK_THAT(smp::test::error_of([&] { smp::make_data(config); },
                                 smp::error_code::config),
             Catch::Matchers::ContainsSubstring("data.batch_size is 0"));
}

TEST_CASE("Masked tokens have a label, all others none", "[runtime][models]") {
  auto config = tiny_model("bert");
  config.data.sequence_length = 20;
  auto xs = smp::make_data(config)->training_batch(1);
  REQUIRE(xs.size() == 2);
  auto masked = xs[0].eq(23);
  CHECK(torch::equal(masked, xs[1].ne(-100)));
  CHECK(masked.sum(1).eq(3).all().item<bool>()); // 15 % of 20
  auto labels = xs[1].masked_select(masked);
  CHECK(labels.min().item<int64_t>() >= 2);
  CHECK(labels.max().item<int64_t>() < 23);
  // What counts up: a label stands between its neighbours.
  auto whole = torch::where(masked, xs[1], xs[0]) - 2;
  CHECK(torch::equal(whole.narrow(1, 1, 19),
                     (whole.narrow(1, 0, 19) + 1).remainder(21)));
}

TEST_CASE("An expert without tokens has no gradient, and is not called",
          "[runtime][models]") {
  auto config = tiny_model("moe");
  config.model.experts = 8;
  auto model = smp::make_trainable(config);
  std::map<std::string, torch::Tensor> parameters;
  for (auto& [name, x] : model->named_parameters())
    parameters.emplace(name, x);
  // All tokens have the largest product with the same expert.
  {
    torch::NoGradGuard guard;
    for (std::string i : {"0", "1", "2", "3"}) {
      auto prefix = "transformer.h." + i;
      parameters.at(prefix + ".ln_2.bias").fill_(1);
      parameters.at(prefix + ".ln_2.weight").zero_();
      auto& router = parameters.at(prefix + ".mlp.router.classifier.weight");
      router.zero_();
      router[5].fill_(1);
    }
  }
  plain_step(config, *model);
  for (auto& [name, x] : parameters)
    if (name.find(".experts.") != std::string::npos) {
      INFO(name);
      CHECK(x.grad().defined() == (name.find("expert_5") != std::string::npos));
    }
}

TEST_CASE("A wrong number of tensors is refused with what the model takes",
          "[runtime][models]") {
  for (auto& name : all_models) {
    CAPTURE(name);
    auto model = smp::make_trainable(tiny_model(name));
    CHECK_THROWS_WITH(model->loss({torch::zeros({2, 8}, torch::kLong)}),
                      Catch::Matchers::ContainsSubstring(
                        "the data has 1 tensors, but this model takes "));
  }
}

TEST_CASE("A TorchScript file trains from a configuration",
          "[runtime][models]") {
  auto ranks = GENERATE(1, 2);
  CAPTURE(ranks);
  auto* root = std::getenv("SMP_SOURCE_DIR");
  REQUIRE(root != nullptr);
  const auto files = std::string{root} + "/tests/data/zoo/mlp";
  scratch_dir dir;
  auto config = tiny_model("torchscript");
  config.model.path = files + ".pt";
  config.data.type = "safetensors";
  config.data.path = files + ".batch.safetensors";
  config.data.batch_size.reset();
  config.smp.pipeline_parallel_degree = static_cast<uint64_t>(ranks);
  config.train.steps = 10;
  config.train.dump_gradients = {1};
  config.train.save_model = true;
  auto losses = losses_of(config, dir.path);
  CHECK(losses.back() < losses.front());
  auto model = smp::make_trainable(config);
  auto loss = plain_step(config, *model);
  CHECK(std::abs(losses[0] - loss) <= 1e-5 * std::abs(loss) + 1e-7);
  auto found = smp::read_safetensors(dir.path / "gradients-1.safetensors");
  auto saved = smp::read_safetensors(dir.path / "model.safetensors");
  for (auto& [name, x] : model->named_parameters()) {
    INFO(name);
    REQUIRE(found.find(name) != nullptr);
    CHECK(excess(*found.find(name), x.grad()) <= 0);
    REQUIRE(saved.find(name) != nullptr);
    CHECK_FALSE(torch::equal(*saved.find(name), x)); // it has learnt
  }
}
