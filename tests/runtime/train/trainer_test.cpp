#include "tests/support/catch.hpp"

#include "runtime/train/trainer.hpp"

#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/session.hpp"
#include "runtime/train/models/builtin.hpp"
#include "runtime/train/models/gpt.hpp"
#include "runtime/train/optimizers.hpp"
#include "runtime/train/text_sampler.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/plain_gpt.hpp"

#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

using Catch::Approx;
using namespace smp::test;

namespace {

// -- learning rate ------------------------------------------------------------

smp::optimizer_config with_schedule(const char* type, uint64_t warmup) {
  smp::optimizer_config result;
  result.lr = 1;
  result.schedule = {.type = type, .warmup_steps = warmup, .final_lr = 0.1};
  return result;
}

std::vector<double> rates(const smp::optimizer_config& x, uint64_t steps) {
  std::vector<double> result;
  for (uint64_t i = 0; i < steps; ++i)
    result.push_back(smp::learning_rate(x, i, steps));
  return result;
}

void check_rates(const std::vector<double>& found,
                 const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    INFO("step " << i);
    CHECK(found[i] == Approx(expected[i]));
  }
}

// -- a run --------------------------------------------------------------------

/// Keeps what it hears.
struct heard_listener : smp::train_listener {
  void on_start(const smp::train_start& x) override {
    start = x;
  }

  void on_step(const smp::step_metrics& x) override {
    steps.push_back(x);
    if (interrupts != nullptr)
      *interrupts = true;
  }

  void on_model(smp::distributed_model_base& x,
                smp::distributed_optimizer&) override {
    model = &x;
  }

  void on_evaluation(uint64_t step, double loss) override {
    evaluations[step] = loss;
    // A step of an evaluation would copy them.
    for (auto& p : model->local_parameters())
      if (p.grad().defined())
        throw std::logic_error{"gradients are left after an update"};
  }

  smp::train_start start;
  std::vector<smp::step_metrics> steps;
  std::map<uint64_t, double> evaluations;
  smp::distributed_model_base* model = nullptr;
  /// Set behind a step, where what comes next is an evaluation.
  std::atomic<bool>* interrupts = nullptr;
};

enum class interrupt { never, in_first_step, behind_it };

smp::train_config small_config(const std::string& text) {
  smp::train_config result;
  result.smp.pipeline_parallel_degree = 2;
  result.smp.microbatches = 2;
  // Measured on a busy machine, so small a model may stay on one rank.
  result.smp.trace_device = "none";
  result.model.type = "gpt";
  result.model.layers = 2;
  result.model.heads = 2;
  result.model.width = 16;
  result.data.type = "text";
  result.data.path = text;
  result.data.sequence_length = 12;
  result.data.batch_size = 4;
  result.optimizer.type = "sgd";
  result.optimizer.lr = 0.5;
  result.optimizer.clip_grad_norm = 0.7;
  result.train.steps = 5;
  result.train.eval_interval = 2;
  result.train.eval_steps = 3;
  result.threads_as_ranks = true;
  return result;
}

struct run_result {
  smp::train_summary summary;
  heard_listener heard;
};

/// Trains on virtual ranks. @returns what each rank got
std::vector<run_result> run(const smp::train_config& config,
                            const std::string& run_dir,
                            interrupt when = interrupt::never) {
  std::vector<run_result> result(config.smp.pipeline_parallel_degree);
  std::atomic<bool> flag = false;
  smp::virtual_world_options world;
  world.config = config.smp;
  smp::run_virtual_world(result.size(), world, [&](smp::session& s) {
    // Only one rank hears the interrupt.
    static const std::atomic<bool> no = false;
    if (when == interrupt::in_first_step)
      flag = true;
    auto last = s.rank() + 1 == result.size();
    auto& mine = result[s.rank()];
    if (when == interrupt::behind_it && last)
      mine.heard.interrupts = &flag;
    mine.summary = smp::train(s, config, run_dir, mine.heard, last ? flag : no);
  });
  return result;
}

std::string long_text() {
  std::string result;
  for (int i = 0; i < 100; ++i)
    result += "light is refracted " + std::to_string(i * i) + " times\n";
  return result;
}

torch::Tensor plain_loss(plain_gpt& model, const smp::batch& x) {
  return torch::nn::functional::cross_entropy(
    model.forward(x.at(0)).flatten(0, 1), x.at(1).flatten());
}

} // namespace

TEST_CASE("The learning rate rises in a line and then stays or falls",
          "[runtime][trainer]") {
  check_rates(rates(with_schedule("constant", 4), 6),
              {0.25, 0.5, 0.75, 1, 1, 1});
  check_rates(rates(with_schedule("linear", 0), 4), {1, 0.7, 0.4, 0.1});
  check_rates(rates(with_schedule("linear", 2), 5), {0.5, 1, 0.7, 0.4, 0.1});
  auto half = 0.1 + 0.9 / 2;
  auto bend = 0.9 * 0.5 * std::cos(M_PI / 4);
  check_rates(rates(with_schedule("cosine", 1), 5),
              {1, half + bend, half, half - bend, 0.1});
  check_rates(rates(with_schedule("cosine", 0), 1), {1});
}

TEST_CASE("Only matrices decay, and a tied weight stands once",
          "[runtime][trainer]") {
  auto matrix = torch::ones({2, 3}, torch::requires_grad());
  auto bias = torch::ones({3}, torch::requires_grad());
  smp::optimizer_config x;
  x.lr = 0.5;
  x.weight_decay = 0.2;
  for (auto type : {"sgd", "adam", "adamw", "adagrad"}) {
    INFO(type);
    x.type = type;
    auto optimizer = smp::make_optimizer(x, {matrix, bias, matrix});
    auto& groups = optimizer->param_groups();
    REQUIRE(groups.size() == 2);
    REQUIRE(groups[0].params().size() == 1);
    REQUIRE(groups[1].params().size() == 1);
    CHECK(groups[0].params()[0].is_same(matrix));
    CHECK(groups[1].params()[0].is_same(bias));
    CHECK(groups[0].options().get_lr() == 0.5);
    smp::set_learning_rate(*optimizer, 0.25);
    CHECK(groups[1].options().get_lr() == 0.25);
    // With zero gradients only decay moves anything.
    matrix.mutable_grad() = torch::zeros_like(matrix);
    bias.mutable_grad() = torch::zeros_like(bias);
    auto before = matrix.detach().clone();
    optimizer->step();
    CHECK_FALSE(torch::equal(matrix, before));
    CHECK(torch::equal(bias, torch::ones({3})));
  }
}

TEST_CASE("A step becomes one line of JSON", "[runtime][trainer]") {
  smp::step_metrics x{.step = 3,
                      .loss = 2.5,
                      .lr = 1e-3,
                      .grad_norm = std::numeric_limits<double>::quiet_NaN(),
                      .step_seconds = 0.5,
                      .samples_per_second = 64,
                      .bubble_ratio = 0.125,
                      .requests = 48,
                      .bytes_sent = 1 << 20};
  CHECK(smp::to_json(x)
        == R"({"step":3,"loss":2.5,"lr":0.001,"grad_norm":null,)"
           R"("step_seconds":0.5,"samples_per_second":64.0,)"
           R"("bubble_ratio":0.125,"requests":48,"bytes_sent":1048576})");
  auto on_devices = x;
  on_devices.devices = {{"cuda:0", 1, 2, 8}, {"cuda:1", 3, 4, 9}};
  CHECK_THAT(smp::to_json(on_devices),
             Catch::Matchers::EndsWith(
               R"(,"device":["cuda:0","cuda:1"],"device_memory":[1,3],)"
               R"("device_peak_memory":[2,4],"device_total_memory":[8,9]})"));
  x.static_mode = "replay";
  CHECK_THAT(smp::to_json(x),
             Catch::Matchers::EndsWith(R"("static":"replay"})"));
  x.ran_again = "\xff"; // no UTF-8
  CHECK_THAT(smp::to_json(x),
             Catch::Matchers::EndsWith("\"ran_again\":\"\xef\xbf\xbd\"}"));
  scratch_dir dir;
  {
    smp::metrics_file file{dir.path / "m.jsonl"};
    file.write(x);
    CHECK(dir.read("m.jsonl") == smp::to_json(x) + "\n"); // before it closes
  }
  // A held-out loss comes later, whatever number it is, and moves nothing.
  for (auto loss : {2.5, -2.2250738585072014e-308, 0.1 + 0.2}) {
    smp::metrics_file file{dir.path / "m.jsonl"};
    x.held_out_loss = std::numeric_limits<double>::quiet_NaN();
    file.write(x);
    auto before = dir.read("m.jsonl");
    CHECK(nlohmann::json::parse(before).at("held_out_loss").is_null());
    file.add_held_out_loss(loss);
    auto after = dir.read("m.jsonl");
    CHECK(after.size() == before.size());
    CHECK(nlohmann::json::parse(after).at("held_out_loss") == loss);
    CHECK(nlohmann::json::parse(after).at("static") == "replay");
    x.held_out_loss.reset();
    file.write(x);
    file.add_held_out_loss(loss); // not of this step
    CHECK(dir.read("m.jsonl") == after + smp::to_json(x) + "\n");
  }
  CHECK_THROWS_WITH(
    smp::metrics_file("/nowhere/m.jsonl"),
    Catch::Matchers::ContainsSubstring("/nowhere/m.jsonl: No such file"));
}

TEST_CASE("Metrics go on after a restart", "[runtime][trainer]") {
  scratch_dir dir;
  auto path = (dir.path / "m.jsonl").string();
  auto step = [](uint64_t number, bool evaluates = false) {
    smp::step_metrics x;
    x.step = number;
    x.loss = 1.0 / 3;
    if (evaluates)
      x.held_out_loss = std::numeric_limits<double>::quiet_NaN();
    return x;
  };
  CHECK_FALSE(smp::steps_done_in(path)); // not there yet
  smp::add_restart(path, {1, 1, 0, "rank 1: \"x\""});
  const std::string first
    = R"({"restart":1,"at_step":1,"from_step":0,"cause":"rank 1: \"x\""})"
      "\n";
  CHECK(dir.read("m.jsonl") == first);
  CHECK(smp::steps_done_in(path) == 0);
  {
    smp::metrics_file file{path, true};
    file.write(step(1));
    file.write(step(2, true));
    file.write(step(3, true));
  }
  CHECK(smp::steps_done_in(path) == 3);
  // The end of a rank breaks the last line.
  auto whole = dir.read("m.jsonl");
  dir.write("m.jsonl", whole + R"({"step":4,"lo)");
  CHECK(smp::steps_done_in(path) == 3);
  smp::add_restart(path, {2, 4, 2, "y"});
  CHECK(dir.read("m.jsonl")
        == whole + R"({"restart":2,"at_step":4,"from_step":2,"cause":"y"})"
             + "\n");
  CHECK(smp::steps_done_in(path) == 2);
  // The evaluation of the step from which it goes on is still to come.
  {
    smp::metrics_file file{path, true};
    file.add_held_out_loss(0.5);
    file.write(step(3));
    file.add_held_out_loss(0.25); // not of this step
  }
  std::istringstream lines{dir.read("m.jsonl")};
  std::vector<std::string> found;
  for (std::string line; std::getline(lines, line);) {
    auto x = nlohmann::json::parse(line);
    found.push_back(x.contains("restart") ? "restart" : x["step"].dump());
    if (x.contains("held_out_loss"))
      found.back() += " " + x["held_out_loss"].dump();
  }
  CHECK(found
        == std::vector<std::string>{"restart", "1", "2 0.5", "3 null",
                                    "restart", "3"});
  CHECK_THROWS_WITH(
    smp::add_restart("/nowhere/m.jsonl", {}),
    Catch::Matchers::ContainsSubstring("/nowhere/m.jsonl: No such file"));
}

TEST_CASE("The sampler draws bytes by their probability",
          "[runtime][trainer]") {
  // exp(logit / T) of a : b : c is 1 : 2 : 4, all others cannot be drawn.
  const double temperature = 0.5;
  auto logits = torch::full({260}, -1e9);
  logits[259] = 1e9; // no byte
  for (int i = 0; i < 3; ++i)
    logits['a' + i] = temperature * i * std::log(2);
  smp::text_sampler sampler{
    "xyz", {.context = 5, .temperature = temperature, .seed = 7}};
  CHECK(torch::equal(sampler.input(),
                     torch::tensor({{'x', 'y', 'z'}}, torch::kLong)));
  const int n = 7000;
  for (int i = 0; i < n; ++i)
    sampler.add(logits);
  auto text = sampler.text();
  REQUIRE(text.size() == n);
  for (int i = 0; i < 3; ++i) {
    auto count = std::count(text.begin(), text.end(), 'a' + i);
    // Standard deviation below 42.
    CHECK(std::abs(static_cast<double>(count) - n * (1 << i) / 7.0) < 200);
  }
  CHECK(sampler.input().sizes() == torch::IntArrayRef{1, 5});
  smp::text_sampler again{
    "xyz", {.context = 5, .temperature = temperature, .seed = 7}};
  for (int i = 0; i < 20; ++i)
    again.add(logits);
  CHECK(again.text() == text.substr(0, 20));
}

TEST_CASE("A run has the losses and norms of a plain loop",
          "[runtime][trainer]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  auto ranks = run(config, dir.path);

  // The same with torch alone, from the same parameters.
  torch::manual_seed(static_cast<int64_t>(config.smp.seed));
  smp::gpt start{smp::sizes_of(config)};
  plain_gpt model{256, 12, 2, 2, 16, 0};
  {
    torch::NoGradGuard guard;
    auto mine = model.named();
    for (auto& item : start->named_parameters())
      mine.at(item.key()).copy_(item.value());
  }
  torch::optim::SGD sgd{model.parameters(), 0.5};
  auto data = smp::make_data(config);
  auto held_out = [&] {
    torch::NoGradGuard guard;
    double sum = 0;
    for (uint64_t i = 0; i < 3; ++i)
      sum += plain_loss(model, data->held_out_batch(i, 3)).item<double>();
    return sum / 3;
  };
  for (uint64_t i = 0; i < 5; ++i) {
    INFO("step " << i);
    sgd.zero_grad();
    auto loss = plain_loss(model, data->training_batch(i));
    loss.backward();
    auto norm = torch::nn::utils::clip_grad_norm_(model.parameters(), 0.7);
    sgd.step();
    for (auto& rank : ranks) {
      auto& x = rank.heard.steps.at(i);
      CHECK(x.step == i + 1);
      CHECK(x.loss == Approx(loss.item<double>()).epsilon(1e-4));
      CHECK(x.grad_norm == Approx(norm).epsilon(1e-3));
      if (i == 1 || i == 3 || i == 4)
        CHECK(rank.heard.evaluations.at(i + 1)
              == Approx(held_out()).epsilon(1e-4));
    }
  }
  for (auto& rank : ranks) {
    CHECK(rank.heard.evaluations.size() == 3); // steps 2, 4, and the last
    CHECK(rank.summary.steps == 5);
    CHECK_FALSE(rank.summary.interrupted);
    CHECK(rank.summary.first_loss == rank.heard.steps.front().loss);
    CHECK(rank.summary.last_loss == rank.heard.steps.back().loss);
    CHECK(rank.summary.held_out_loss == rank.heard.evaluations.at(5));
    CHECK(rank.summary.unigram_entropy.has_value());
    CHECK(rank.summary.peak_memory.size() == 2);
  }
  // Every parameter has one owner.
  auto& a = ranks[0].heard.start;
  auto& b = ranks[1].heard.start;
  CHECK(a.parameters == b.parameters);
  CHECK(a.owned + b.owned == a.parameters);
  CHECK(a.owned > 0);
  CHECK(b.owned > 0);
}

TEST_CASE("The record of a step has the held-out loss that came after it",
          "[runtime][trainer]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  auto ranks = run(config, dir.path);
  auto& evaluations = ranks[0].heard.evaluations;
  REQUIRE(evaluations.size() == 3);
  std::istringstream lines{dir.read("metrics.jsonl")};
  for (uint64_t step = 1; step <= 5; ++step) {
    INFO("step " << step);
    std::string line;
    REQUIRE(static_cast<bool>(std::getline(lines, line)));
    auto x = nlohmann::json::parse(line);
    CHECK(x.at("step") == step);
    auto evaluated = evaluations.count(step) == 1;
    CHECK(x.contains("held_out_loss") == evaluated);
    if (evaluated)
      CHECK(x.at("held_out_loss") == evaluations.at(step));
  }
}

TEST_CASE("An interrupt of any rank ends the run on all after the step",
          "[runtime][trainer]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  config.train.save_model = true;
  config.train.eval_interval = 1;
  for (auto& rank : run(config, dir.path, interrupt::in_first_step)) {
    CHECK(rank.summary.interrupted);
    CHECK(rank.summary.steps == 1);
    CHECK(rank.heard.evaluations.empty());
    CHECK_FALSE(rank.summary.held_out_loss.has_value());
  }
  CHECK_FALSE(dir.read("model.safetensors").empty());
  // No evaluation, and no sign of one.
  CHECK_THAT(dir.read("metrics.jsonl"),
             !Catch::Matchers::ContainsSubstring("held_out_loss"));
}

TEST_CASE("An interrupt ends an evaluation, and saves the step before it",
          "[runtime][trainer][checkpoint]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  config.train.eval_interval = 1;
  config.optimizer.ema_decay = 0.5;
  config.checkpoint.dir = dir.path / "checkpoints";
  config.checkpoint.interval = 100;
  config.checkpoint.on_interrupt = GENERATE(true, false);
  for (auto& rank : run(config, dir.path, interrupt::behind_it)) {
    CHECK(rank.summary.interrupted);
    CHECK(rank.summary.steps == 1);
    CHECK(rank.heard.evaluations.empty());
  }
  auto saved = smp::newest_checkpoint(config.checkpoint.dir);
  CHECK((saved ? saved->step : 0)
        == (config.checkpoint.on_interrupt ? 1u : 0u));
}

namespace {

/// Interrupts the run with the second batch of an evaluation.
class interrupting_data final : public smp::data_source {
public:
  interrupting_data(const smp::train_config& config, std::atomic<bool>& flag)
    : inner_(smp::make_data(config, 1)), flag_(flag) {
    // nop
  }

  uint64_t batch_size() const noexcept override {
    return inner_->batch_size();
  }

  std::vector<smp::file_content> files() const override {
    return inner_->files();
  }

  bool has_held_out() const noexcept override {
    return inner_->has_held_out();
  }

private:
  smp::batch make_training(uint64_t step, smp::batch_part part) const override {
    return inner_->training_batch(step, part);
  }

  smp::batch make_held_out(uint64_t index, uint64_t count,
                           smp::batch_part part) const override {
    if (index == 1)
      flag_ = true;
    return inner_->held_out_batch(index, count, part);
  }

  std::unique_ptr<smp::data_source> inner_;
  std::atomic<bool>& flag_;
};

/// @param interrupts an evaluation does; or not
/// @returns the loss of each step
std::vector<double> losses_of(const smp::train_config& config,
                              const std::filesystem::path& run_dir,
                              bool interrupts) {
  std::filesystem::create_directory(run_dir);
  std::atomic<bool> flag = false;
  smp::train_job job;
  if (interrupts)
    job.make_data = [&] {
      return std::make_unique<interrupting_data>(config, flag);
    };
  std::vector<double> result;
  smp::virtual_world_options world;
  world.config = config.smp;
  smp::run_virtual_world(2, world, [&](smp::session& s) {
    heard_listener heard;
    smp::train(s, config, run_dir, heard, flag, job);
    if (s.rank() == 0)
      for (auto& x : heard.steps)
        result.push_back(x.loss);
  });
  return result;
}

} // namespace

TEST_CASE(
  "A run that was interrupted in an evaluation goes on as if nothing had been",
  "[runtime][trainer][checkpoint][R51]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  config.model.dropout = 0.3; // each step draws other numbers
  auto expected = losses_of(config, dir.path / "whole", false);
  config.checkpoint.dir = dir.path / "checkpoints";
  config.checkpoint.interval = 100;
  config.checkpoint.on_interrupt = true;
  auto found = losses_of(config, dir.path / "begin", true);
  REQUIRE(found.size() == config.train.eval_interval);
  auto rest = losses_of(config, dir.path / "rest", false);
  found.insert(found.end(), rest.begin(), rest.end());
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(found[i] == Approx(expected[i]).epsilon(1e-4));
  }
}

TEST_CASE("All ranks sample the same text", "[runtime][trainer]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  config.train.steps = 1;
  config.train.sample = 20;
  auto ranks = run(config, dir.path);
  CHECK(ranks[0].summary.sample.size() == 20);
  CHECK(ranks[0].summary.sample == ranks[1].summary.sample);
}

TEST_CASE("A loss that is not finite is an error of numbers on all ranks",
          "[runtime][trainer]") {
  scratch_dir dir;
  auto config = small_config(dir.write("text.txt", long_text()));
  config.optimizer.lr = 1e30;
  try {
    run(config, dir.path);
    FAIL("nothing was thrown");
  } catch (const smp::error& e) {
    CHECK(e.code() == smp::error_code::numbers);
    CHECK_THAT(e.what(), Catch::Matchers::ContainsSubstring(": the loss is "));
  }
}
