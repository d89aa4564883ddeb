#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// What a rank has in memory while it saves and goes on: what it owns, and a
// piece of one tensor (docs/checkpoints.md).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t wide = 256;
constexpr int layers = 8;
constexpr int64_t piece = 4 * wide * wide; // bytes of a weight
constexpr int64_t whole_state = 2 * layers * piece;

struct stack_impl : torch::nn::Module {
  stack_impl() {
    for (int i = 0; i < layers; ++i) {
      body.emplace_back(torch::nn::LinearOptions(wide, wide).bias(false));
      register_module("layer" + std::to_string(i), body.back());
    }
  }

  Tensor forward(Tensor x) {
    for (auto& layer : body)
      x = torch::tanh(layer(x));
    return x;
  }

  std::vector<submodule<torch::nn::Linear>> body;
};
TORCH_MODULE_IMPL(stack, stack_impl);

struct loading_grid {
  uint64_t pipeline = 1;
  uint64_t tensor = 1;
  uint64_t replicas = 1; // which share the optimizer's state

  uint64_t ranks() const {
    return pipeline * tensor * replicas;
  }

  virtual_world_options world() const {
    auto result = manual_world(pipeline);
    auto& x = result.config;
    x.ddp = tensor * replicas > 1;
    x.tensor_parallel_degree = tensor;
    if (tensor > 1)
      x.tensor_parallel_modules = {"*"};
    x.shard_optimizer_state = replicas > 1;
    return result;
  }
};

/// Calls `f` on each rank with the session, the model and its optimizer.
template <class F>
void on_ranks(const loading_grid& x, F f) {
  run_virtual_world(x.ranks(), x.world(), [&](session& s) {
    distributed_model model{seeded([] { return stack{}; })};
    place_in_turn(model);
    torch::optim::Adam adam{model->parameters(),
                            torch::optim::AdamOptions(0.01)};
    distributed_optimizer optimizer{adam};
    model.partition();
    f(s, model, optimizer);
  });
}

/// Of tensors that `f` makes on this thread.
template <class F>
live_bytes bytes_in(F f) {
  auto result = std::make_shared<live_bytes>();
  c10::DebugInfoGuard count{c10::DebugInfoKind::PROFILER_STATE, result};
  f();
  return *result;
}

} // namespace

TEST_CASE("no rank has more than a piece beside what it owns",
          "[runtime][checkpoint][memory][R51]") {
  constexpr int64_t small = 64 << 10; // counts, and a generator's state
  scratch_dir dir, again;
  on_ranks({}, [&](session&, auto& model, auto& optimizer) {
    auto train_step = training_step(model, sum_of);
    train_step(torch::ones({2, wide}));
    optimizer.step();
    save_checkpoint(dir.path, 1, model, {&optimizer});
  });
  for (auto& x : {loading_grid{.pipeline = 4}, loading_grid{.tensor = 2},
                  loading_grid{.replicas = 2},
                  loading_grid{.tensor = 2, .replicas = 2}}) {
    INFO(x.pipeline << " " << x.tensor << " " << x.replicas);
    std::vector<live_bytes> loaded(x.ranks()), saved(x.ranks());
    on_ranks(x, [&](session& s, auto& model, auto& optimizer) {
      loaded.at(s.rank()) = bytes_in(
        [&] { resume_from_checkpoint(dir.path, model, {&optimizer}); });
      saved.at(s.rank()) = bytes_in(
        [&] { save_checkpoint(again.path, 1, model, {&optimizer}); });
    });
    auto own = whole_state / static_cast<int64_t>(x.ranks());
    for (uint64_t rank = 0; rank < x.ranks(); ++rank) {
      INFO("rank " << rank);
      CHECK(loaded[rank].now >= own);
      CHECK(loaded[rank].now <= own + small);
      // The piece as it was written, and what of it is wanted.
      CHECK(loaded[rank].peak <= own + 2 * piece + small);
      CHECK(saved[rank].peak <= piece + small);
    }
  }
}
