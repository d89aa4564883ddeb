#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

// smp.deterministic_server: the first steps of a run find the order of those
// that come later, and who goes on from a checkpoint needs it at once (R51).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 8;

/// One layer on another rank is used over and over, so there are many orders in
/// which its calls may add to its gradient.
struct reuse_impl : torch::nn::Module {
  reuse_impl() {
    auto on = [&](uint32_t rank, const char* name) {
      partition_scope scope{rank};
      auto result = submodule<torch::nn::Linear>(width, width);
      register_module(name, result);
      return result;
    };
    shared = on(1, "shared");
    own = on(0, "own");
    right = on(1, "right");
  }

  Tensor forward(Tensor x) {
    for (int i = 0; i < 3; ++i) {
      auto y = shared(right(shared(x)));
      x = own(torch::tanh(y + shared(y)));
    }
    return x.pow(2).sum();
  }

  submodule<torch::nn::Linear> shared = nullptr, own = nullptr, right = nullptr;
};
TORCH_MODULE_IMPL(reuse, reuse_impl);

Tensor data_of(uint64_t step) {
  return torch::sin(torch::arange(16 * width)
                    * (0.1 * static_cast<double>(step + 1)))
    .view({16, width});
}

struct run_end {
  std::map<std::string, Tensor> state;
  /// Of each step, whether it went in the order that earlier ones found.
  std::vector<bool> ordered;
};

/// Goes on from what is in the folder, if anything, up to so many steps, and
/// saves the end.
run_end train(const std::string& dir, uint64_t steps,
              const virtual_world_options& world, uint64_t ranks = 2) {
  run_end result;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return reuse{}; })};
    torch::optim::SGD sgd{model->parameters(),
                          torch::optim::SGDOptions(0.01).momentum(0.9)};
    distributed_optimizer optimizer{sgd};
    auto train_step = training_step(model);
    auto compute = [&](uint64_t i) {
      auto replicas = static_cast<int64_t>(dp_size());
      train_step(data_of(i).chunk(replicas).at(dp_rank()));
    };
    auto from = resume_from_checkpoint(dir, model, {&optimizer}, compute);
    for (auto i = from ? from->step : uint64_t{0}; i < steps; ++i) {
      optimizer.zero_grad();
      compute(i);
      optimizer.step();
      if (s.rank() == 0)
        result.ordered.push_back(s.last_step().replayed);
    }
    save_checkpoint(dir, steps, model, {&optimizer});
    auto state = model.state_dict();
    if (s.rank() == 0)
      result.state = {state.begin(), state.end()};
  });
  return result;
}

/// A pipeline of two, and after how many steps it ends.
struct broken_run {
  uint64_t replicas = 1;
  uint64_t tensor = 1;
  bool parts = false; // of the optimizer's state, and of gradients
  std::optional<bool> fast = {};
  uint64_t after = 2;

  virtual_world_options world() const {
    auto result = manual_world(2, 4);
    auto& x = result.config;
    x.deterministic_server = true;
    x.fast_mode = fast;
    x.ddp = replicas * tensor > 1;
    x.shard_optimizer_state = x.shard_gradients = parts;
    x.tensor_parallel_degree = tensor;
    if (tensor > 1)
      x.tensor_parallel_modules = {"shared"};
    return result;
  }
};

} // namespace

TEST_CASE("a program that rehearses goes on with the bits of an unbroken run",
          "[runtime][checkpoint][deterministic][R51]") {
  auto x = GENERATE(
    broken_run{.after = 2}, broken_run{.after = 6},
    broken_run{.fast = false, .after = 2},
    broken_run{.fast = false, .after = 6}, broken_run{.replicas = 2},
    broken_run{.replicas = 2, .parts = true},
    broken_run{.replicas = 2, .parts = true, .fast = false, .after = 6},
    broken_run{.tensor = 2});
  CAPTURE(x.replicas, x.tensor, x.parts, x.fast.has_value(), x.after);
  constexpr uint64_t steps = 9;
  auto ranks = 2 * x.replicas * x.tensor;
  auto world = x.world();
  scratch_dir whole, parts;
  auto expected = train(whole.path, steps, world, ranks);
  world.seed = 2;
  train(parts.path, x.after, world, ranks);
  world.seed = 3;
  auto found = train(parts.path, steps, world, ranks);
  REQUIRE(expected.ordered.size() == steps);
  CHECK(expected.ordered.back());
  CHECK(found.ordered
        == std::vector<bool>(expected.ordered.begin()
                               + static_cast<std::ptrdiff_t>(x.after),
                             expected.ordered.end()));
  REQUIRE(found.state.size() == expected.state.size());
  for (auto& [name, y] : expected.state) {
    INFO(name);
    CHECK(found.state.at(name).equal(y));
  }
}

TEST_CASE("nobody rehearses where the order is a matter of timing anyway",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  auto world = manual_world(2, 4);
  train(dir.path, 2, world);
  std::vector<int> calls(2);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return reuse{}; })};
    torch::optim::SGD sgd{model->parameters(),
                          torch::optim::SGDOptions(0.01).momentum(0.9)};
    distributed_optimizer optimizer{sgd};
    resume_from_checkpoint(dir.path, model, {&optimizer},
                           [&](uint64_t) { ++calls.at(s.rank()); });
    model.partition();
  });
  CHECK(calls == std::vector<int>{0, 0});
}
