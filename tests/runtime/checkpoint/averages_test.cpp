#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// Saving and going on between two `swap_averages()`: who evaluates with
// averages saves the best of them there (docs/precision.md).

using namespace smp;
using namespace smp::test;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t ranks = 4; // two replicas of two

struct averaged_job {
  bool shards = false;
  bool half = false;
};

using values = std::map<std::string, Tensor>;

/// What each rank is told of the whole model.
struct end_of_run {
  std::vector<values> weights = std::vector<values>(ranks);
  std::vector<values> averages = std::vector<values>(ranks);
};

template <class Model>
values values_of(const Model& model) {
  auto xs = model.state_dict();
  return {xs.begin(), xs.end()};
}

/// Calls `f` on each rank with the session, the model, its optimizer and what
/// makes a step.
template <class F>
void run_ranks(const averaged_job& x, F f) {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.ddp = true;
  world.config.shard_optimizer_state = x.shards;
  world.config.bf16_params = x.half;
  world.config.threads = 1;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return two_layers{}; })};
    place_in_turn(model);
    torch::optim::SGD sgd{model->parameters(), 0.5};
    distributed_optimizer optimizer{sgd, {.ema_decay = 0.75}};
    auto train_step = step([&](Tensor data) {
      auto loss = model(data).to(torch::kFloat).square().mean();
      model.backward(loss);
      return loss;
    });
    f(s, model, optimizer, [&](int64_t i) {
      optimizer.zero_grad();
      auto data = torch::sin(torch::arange(32).view({8, 4}) * 0.3 + i);
      train_step(data.to(x.half ? torch::kBFloat16 : torch::kFloat)
                   .chunk(static_cast<int64_t>(dp_size()))
                   .at(dp_rank()));
      optimizer.step();
    });
  });
}

/// Three steps, then a checkpoint of the weights in PATH/outside, and one while
/// they are averages in PATH/inside.
end_of_run save_both(const averaged_job& x, const fs::path& path) {
  end_of_run result;
  run_ranks(x, [&](session& s, auto& model, auto& optimizer, auto train) {
    for (int64_t i = 0; i < 3; ++i)
      train(i);
    save_checkpoint(path / "outside", 3, model, {&optimizer});
    result.weights.at(s.rank()) = values_of(model);
    optimizer.swap_averages();
    save_checkpoint(path / "inside", 3, model, {&optimizer});
    result.averages.at(s.rank()) = values_of(model); // they still are
    optimizer.swap_averages();
    for (auto& [name, y] : values_of(model))
      if (!torch::equal(y, result.weights.at(s.rank()).at(name)))
        throw std::runtime_error{name + " did not come back"};
  });
  return result;
}

/// Goes on from a checkpoint while the parameters are averages, and back.
/// @param trained the session has made steps of its own before
end_of_run go_on_inside(const averaged_job& x, const fs::path& path,
                        bool trained) {
  end_of_run result;
  run_ranks(x, [&](session& s, auto& model, auto& optimizer, auto train) {
    if (trained)
      train(5);
    optimizer.swap_averages();
    resume_from_checkpoint(path, model, {&optimizer});
    model.partition();
    result.averages.at(s.rank()) = values_of(model);
    optimizer.swap_averages();
    result.weights.at(s.rank()) = values_of(model);
  });
  return result;
}

bool same(const std::vector<values>& xs, const std::vector<values>& ys) {
  auto equal = [](const values& a, const values& b) {
    return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
      return x.first == y.first && torch::equal(x.second, y.second);
    });
  };
  return std::ranges::equal(xs, ys, equal);
}

checkpoint_manifest manifest_of(const fs::path& folder) {
  auto path = folder / "step-3/manifest.json";
  return parse_manifest(content_of(path), path);
}

} // namespace

TEST_CASE("a checkpoint of parameters that are averages has the weights",
          "[runtime][checkpoint][precision][R51]") {
  auto shards = GENERATE(false, true);
  auto half = GENERATE(false, true);
  CAPTURE(shards, half);
  scratch_dir dir;
  auto saved = save_both({shards, half}, dir.path);
  REQUIRE_FALSE(saved.weights[0].empty());
  CHECK_FALSE(same(saved.weights, saved.averages));
  // With checksums of all bytes.
  auto outside = manifest_of(dir.path / "outside");
  auto inside = manifest_of(dir.path / "inside");
  REQUIRE(inside.tensors.size() == outside.tensors.size());
  for (size_t i = 0; i < outside.tensors.size(); ++i) {
    INFO(outside.tensors[i].name);
    CHECK((inside.tensors[i] == outside.tensors[i]));
  }
}

TEST_CASE(
  "a run that goes on while parameters are averages has those of the file",
  "[runtime][checkpoint][precision][R51]") {
  auto shards = GENERATE(false, true);
  auto half = GENERATE(false, true);
  CAPTURE(shards, half);
  scratch_dir dir;
  auto saved = save_both({shards, half}, dir.path);
  for (auto trained : {false, true}) {
    INFO("after steps of its own: " << trained);
    auto found = go_on_inside({shards, half}, dir.path / "outside", trained);
    CHECK(same(found.averages, saved.averages));
    CHECK(same(found.weights, saved.weights));
  }
}
