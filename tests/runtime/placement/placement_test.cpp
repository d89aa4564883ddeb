#include "tests/support/catch.hpp"

#include "runtime/plan/planner.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <nlohmann/json.hpp>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// Modules that a configuration places by name (smp.manual_partition), of
// whatever type the model is.

using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

smp::train_config script_config() {
  smp::train_config x;
  x.model.type = "torchscript";
  x.model.path = source_file("tests/data/zoo/mlp.pt");
  x.data.type = "safetensors";
  x.data.path = source_file("tests/data/zoo/mlp.batch.safetensors");
  x.smp.pipeline_parallel_degree = 2;
  x.smp.microbatches = 2;
  x.train.steps = 2;
  return x;
}

/// @returns the device of each module that is placed
std::map<std::string, int> devices_of(const smp::train_config& x) {
  auto plan = nlohmann::json::parse(smp::plan_model(x).json);
  std::map<std::string, int> result;
  for (auto& node : plan.at("nodes"))
    for (auto& module : node.at("modules"))
      result[module] = node.at("device");
  return result;
}

class silent : public smp::train_listener {
public:
  explicit silent(std::vector<std::string>& owned) : owned_(owned) {
    // nop
  }

  void on_start(const smp::train_start&) override {
    // nop
  }

  void on_model(smp::distributed_model_base& model,
                smp::distributed_optimizer&) override {
    owned_ = model.local_module_names();
  }

  void on_step(const smp::step_metrics& x) override {
    losses.push_back(x.loss);
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

  std::vector<double> losses;

private:
  std::vector<std::string>& owned_;
};

/// Trains on virtual ranks. @returns the losses
std::vector<double> train(const smp::train_config& config,
                          std::vector<std::string>& on_rank_1) {
  scratch_dir dir;
  const std::atomic<bool> stop = false;
  smp::virtual_world_options world;
  world.config = config.smp;
  std::vector<double> result;
  std::vector<std::string> on_rank_0;
  smp::run_virtual_world(2, world, [&](smp::session& s) {
    silent listener{s.rank() == 0 ? on_rank_0 : on_rank_1};
    smp::train(s, config, dir.path, listener, stop);
    if (s.rank() == 0)
      result = listener.losses;
  });
  return result;
}

} // namespace

TEST_CASE("a configuration places modules of a TorchScript file by name",
          "[runtime][partition]") {
  auto config = script_config();
  // Else all would go by cost, or to the default.
  auto automatic = GENERATE(true, false);
  config.smp.auto_partition = automatic;
  config.manual_partition = {{"body.2", 1}, {"head", 0}};
  auto devices = devices_of(config);
  CHECK(devices.at("head") == 0);
  for (auto& [name, device] : devices)
    if (name.starts_with("body.2")) {
      INFO(name);
      CHECK(device == 1);
    }
  config.manual_partition = {{"body.2", 0}, {"head", 1}};
  CHECK(devices_of(config).at("head") == 1);
  CHECK(devices_of(config).at("body.2") == 0);
}

TEST_CASE("what a configuration places by name is there in training",
          "[runtime][partition]") {
  auto config = script_config();
  config.smp.auto_partition = false;
  std::vector<std::string> on_rank_1;
  auto together = train(config, on_rank_1);
  CHECK(on_rank_1.empty());
  config.manual_partition = {{"body.0", 1}, {"head", 1}};
  auto apart = train(config, on_rank_1);
  CHECK(on_rank_1 == std::vector<std::string>{"body.0", "head"});
  REQUIRE(apart.size() == 2);
  for (size_t i = 0; i < apart.size(); ++i)
    CHECK(apart[i] == Catch::Approx(together[i]).epsilon(1e-5));
}

TEST_CASE("a configuration places modules of a built-in model by name",
          "[runtime][partition]") {
  smp::train_config config;
  config.smp.pipeline_parallel_degree = 2;
  config.smp.trace_device = "none";
  config.model.type = "mlp";
  config.model.layers = 4;
  config.data.type = "synthetic";
  config.data.batch_size = 4;
  for (int device : {0, 1}) {
    config.manual_partition = {{"layers.2", static_cast<uint64_t>(device)}};
    CHECK(devices_of(config).at("layers.2") == device);
  }
}

TEST_CASE("a name that the model has not says which there are",
          "[runtime][partition]") {
  auto config = script_config();
  auto errors = std::map<std::string, std::string>{
    {"body.9", "the model has no module 'body.9'; 'body' has 0, 1, 2, 3"},
    {"tail", "the model has no module 'tail'; the model has body, head"},
    {"head.x.y",
     "the model has no module 'head.x.y'; 'head' has no modules in it"}};
  for (auto& [name, text] : errors) {
    config.manual_partition = {{name, 1}};
    CHECK_THROWS_WITH(smp::plan_model(config),
                      ContainsSubstring("smp.manual_partition: " + text));
  }
  // The session's own rules hold, too.
  config.manual_partition = {{"", 1}};
  CHECK_THROWS_WITH(smp::plan_model(config),
                    ContainsSubstring("is pinned to device 1, but the root "
                                      "runs where the step runs"));
}
