#include "tests/support/catch.hpp"

#include "runtime/offload/offload_store.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

// What backward computes again, with arguments that were in a file meanwhile
// (R57), has the numbers of plain LibTorch, and of the run that keeps them.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;
using torch::nn::Dropout;
using torch::nn::Linear;

namespace {

using again = model_options::again;
using none = std::vector<std::string>;

constexpr int64_t wide = 64;
constexpr int64_t rows = 512;

template <template <class> class P>
struct tower : torch::nn::Module {
  tower() {
    for (int i = 0; i < 6; ++i) {
      body->push_back(Linear(wide, wide));
      body->push_back(Dropout(0.3));
      body->push_back(torch::nn::Tanh());
    }
    register_module("body", body);
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    return head(body->forward(x)).square().mean();
  }
  torch::nn::Sequential body;
  P<Linear> head{wide, 1};
};

std::vector<Tensor> wide_batches(int n) {
  std::vector<Tensor> result;
  for (int i = 0; i < n; ++i)
    result.push_back(
      torch::sin(torch::arange(1.0 * rows * wide) * (i + 1) * 0.7)
        .view({rows, wide}));
  return result;
}

model_options tower_options() {
  model_options x;
  x.recompute = again::outermost;
  x.offload = true;
  x.microbatches = 8;
  x.tolerance = 1e-4;
  return x;
}

} // namespace

TEST_CASE("every strategy and schedule finds its arguments in the file",
          "[runtime][R57]") {
  for (auto* strategy : {"each", "contiguous", "group_2"})
    for (auto* pipeline : {"simple", "interleaved", "1f1b"})
      for (uint64_t ranks : {1, 2}) {
        auto x = tower_options();
        x.strategy = strategy;
        x.pipeline = pipeline;
        x.ranks = ranks;
        x.round_robin = true;
        INFO(strategy << ", " << pipeline << ", " << ranks << " ranks");
        auto steps = run_ranks<tower>(x, wide_batches(3));
        CHECK(differences<tower>(x, wide_batches(3), steps) == none{});
        CHECK(steps.back().stats.offloaded_bytes > 0);
      }
}

TEST_CASE("a run has the same bits with a file and without", "[runtime][R57]") {
  for (uint64_t ranks : {1, 2}) {
    std::vector<std::vector<model_step>> runs;
    for (auto offload : {false, true}) {
      auto x = tower_options();
      x.offload = offload;
      x.ranks = ranks;
      x.fixed_order = true;
      x.steps = 4;
      runs.push_back(run_ranks<tower>(x, wide_batches(4)));
    }
    for (size_t i = 0; i < 4; ++i) {
      CHECK(runs[0][i].stats.offloaded_bytes == 0);
      CHECK(runs[1][i].stats.offloaded_bytes > 0);
      // The order of additions is fixed from the second step on.
      if (i == 0 && ranks > 1)
        continue;
      for (auto& [name, x] : runs[0][i].gradients)
        CHECK((ranks > 1 || torch::equal(x, runs[1][i].gradients.at(name))));
    }
  }
}

TEST_CASE("a replayed step finds its arguments in the file",
          "[runtime][R57][R33]") {
  for (auto fast : {false, true}) {
    auto x = tower_options();
    x.fast = fast;
    x.replay = true;
    x.steps = fast ? 8 : 3;
    std::vector<Tensor> same(static_cast<size_t>(x.steps), wide_batches(1)[0]);
    auto steps = run_ranks<tower>(x, same);
    CHECK(differences<tower>(x, same, steps) == none{});
    CHECK(steps.back().stats.replayed);
    CHECK(steps.back().stats.offloaded_bytes > 0);
  }
}

// -- configuration ------------------------------------------------------------

namespace {

virtual_world_options offload_world() {
  auto result = manual_world(1, 2);
  result.config.activation_checkpointing.modules = {"body"};
  result.config.offload_activations = true;
  result.config.activation_loading_horizon = 1;
  return result;
}

void run_tower(const virtual_world_options& world,
               const std::function<void(session&)>& after = {}) {
  run_virtual_world(1, world, [&](session& s) {
    distributed_model model{make_seeded<holder<tower, submodule>>()};
    auto train_step = training_step(model);
    for (int i = 0; i < 3; ++i)
      train_step(wide_batches(1)[0]);
    if (after)
      after(s);
  });
}

} // namespace

TEST_CASE("nothing is seen of the file, and it does not grow",
          "[runtime][R57]") {
  scratch_dir dir;
  auto world = offload_world();
  world.config.offload_dir = dir.path;
  auto checked = false;
  run_tower(world, [&](session& s) {
    s.internals().offload()->stop(); // ends what is under way
    auto x = s.internals().offload()->status();
    assertion_lock asserting;
    CHECK(std::filesystem::is_empty(dir.path));
    CHECK(x.bytes == 0);
    CHECK(x.stayed == 0);
    // 18 arguments of 64 KB of one microbatch, of which some were never
    // written: it is the same microbatch that turns around.
    CHECK(x.peak_bytes <= 2 * 18 * 65536);
    CHECK(x.written >= 3 * 2 * 10 * 65536);
    CHECK(x.read <= x.written);
    CHECK(x.file_bytes <= 16 << 20);
    checked = true;
  });
  CHECK(checked);
}

TEST_CASE("a folder that is not there ends a session before it begins",
          "[runtime][R57]") {
  auto world = offload_world();
  world.config.offload_dir = "/nowhere";
  CHECK_THAT(error_of([&] { run_tower(world); }, error_code::config),
             ContainsSubstring("cannot make a file in '/nowhere'")
               && ContainsSubstring("smp.offload_dir"));
}

TEST_CASE("offload without anything that is computed again is refused",
          "[runtime][R57]") {
  auto world = offload_world();
  world.config.activation_checkpointing.modules = {};
  CHECK_THAT(error_of([&] { run_tower(world); }, error_code::config),
             ContainsSubstring("smp.offload_activations has no effect")
               && ContainsSubstring("activation_checkpointing.modules")
               && ContainsSubstring("smp::set_activation_checkpointing"));
}

TEST_CASE("evaluation writes nothing", "[runtime][R57]") {
  auto world = offload_world();
  run_virtual_world(1, world, [&](session& s) {
    distributed_model model{make_seeded<holder<tower, submodule>>()};
    model->eval();
    auto evaluate = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x);
    });
    evaluate(wide_batches(1)[0]);
    assertion_lock asserting;
    CHECK(s.internals().offload()->status().written == 0);
  });
}

TEST_CASE(
  "an argument that is changed after the call is an error also when it "
  "is in the file",
  "[runtime][R57][R52]") {
  auto world = offload_world();
  auto text = error_of([&] {
    run_virtual_world(1, world, [&](session&) {
      distributed_model model{make_seeded<holder<tower, submodule>>()};
      auto train_step = step([&](Tensor x) {
        auto h = x * 2;
        auto loss = model->head(model->body->forward(h)).square().mean();
        h.add_(1);
        model.backward(loss);
        return loss;
      });
      train_step(wide_batches(1)[0]);
    });
  });
  CHECK_THAT(text, ContainsSubstring("was changed in place after the call"));
}

TEST_CASE("what is differentiated twice is in memory the second time",
          "[runtime][R57]") {
  std::map<bool, Tensor> gradients;
  for (auto offload : {false, true}) {
    auto world = offload_world();
    world.config.offload_activations = offload;
    if (!offload)
      world.config.activation_loading_horizon = session_config{}
                                                  .activation_loading_horizon;
    run_virtual_world(1, world, [&](session&) {
      distributed_model model{make_seeded<holder<tower, submodule>>()};
      auto train_step = step([&](Tensor x) {
        auto loss = model(x);
        model.backward(loss, {}, true);
        model.backward(loss * 2);
        return loss.detach();
      });
      train_step(wide_batches(1)[0]);
      gradients[offload] = model->head->weight.grad().clone();
    });
  }
  CHECK(torch::equal(gradients.at(false), gradients.at(true)));
}
