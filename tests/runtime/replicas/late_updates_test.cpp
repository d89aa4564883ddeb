#include "tests/support/catch.hpp"

#include "runtime/lazy/late_value.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

// Parameters that other replicas updated come while the next step runs (R61).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t edge = 512; // 1 MB

/// Fails instead of waiting for ever.
void await_flag(const std::atomic<bool>& x) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  while (!x) {
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error{"nobody went on"};
    std::this_thread::yield();
  }
}

/// The first replica updates the first half, the second the second.
struct halves_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    auto y = x.mm(first);
    if (reached != nullptr)
      *reached = true;
    return y.mm(second);
  }

  Tensor first = register_parameter("first", torch::eye(edge));
  Tensor second = register_parameter("second", torch::eye(edge));
  std::atomic<bool>* reached = nullptr;
};
TORCH_MODULE_IMPL(halves, halves_impl);

/// The second update of one replica waits, or does not come.
class slow_sgd : public torch::optim::SGD {
public:
  using SGD::SGD;

  Tensor step(LossClosure closure = nullptr) override {
    if (go_on != nullptr)
      await_flag(*go_on);
    if (breaks)
      throw std::runtime_error{"no such luck"};
    return SGD::step(std::move(closure));
  }

  std::atomic<bool>* go_on = nullptr;
  bool breaks = false;
};

session_config two_replicas(bool overlaps) {
  session_config x;
  x.ddp = true;
  x.shard_optimizer_state = true;
  x.overlapping_allreduce = overlaps;
  x.threads = 1;
  return x;
}

/// What the parameters of two replicas are after so many steps of SGD.
Tensor expected_second(int steps) {
  auto first = torch::eye(edge).requires_grad_();
  auto second = torch::eye(edge).requires_grad_();
  torch::optim::SGD sgd({first, second}, 0.1);
  for (int i = 0; i < steps; ++i) {
    sgd.zero_grad();
    torch::full({2, edge}, 0.5).mm(first).mm(second).mean().backward();
    sgd.step();
  }
  return second.detach();
}

} // namespace

TEST_CASE("a replica goes on until it needs what another one updates",
          "[runtime][shards][R61]") {
  std::atomic<bool> reached = false;
  std::vector<Tensor> seconds(2);
  virtual_world_options world;
  world.config = two_replicas(true);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{halves{}};
    slow_sgd inner{model->parameters(), 0.1};
    distributed_optimizer optimizer{inner};
    auto train_step = training_step(model, mean_of);
    auto update = [&] {
      optimizer.zero_grad();
      train_step(torch::full({2, edge}, 0.5));
      optimizer.step();
    };
    update();
    auto is_first = s.rank() == 0;
    // Of what it updates itself nothing is late.
    {
      assertion_lock held;
      CHECK_FALSE(is_late(is_first ? model->first : model->second));
    }
    // The second replica updates only when the first one is in its next step,
    // past the parameter that it updated itself.
    if (is_first)
      model->reached = nullptr;
    else
      inner.go_on = &reached;
    optimizer.zero_grad();
    train_step(torch::full({2, edge}, 0.5));
    optimizer.step();
    if (is_first) {
      assertion_lock held;
      CHECK(is_late(model->second));
      CHECK_FALSE(is_placeholder(model->second));
      CHECK_FALSE(is_late(model->first));
      model->reached = &reached;
    }
    inner.go_on = nullptr;
    update();
    seconds[s.rank()] = model->second.detach().clone();
    assertion_lock held;
    CHECK_FALSE(is_late(model->second));
  });
  auto expected = expected_second(3);
  for (auto& x : seconds)
    CHECK(torch::allclose(x, expected, 1e-6, 1e-7));
}

TEST_CASE("without overlap an update ends when all have it",
          "[runtime][shards][R61]") {
  virtual_world_options world;
  world.config = two_replicas(false);
  std::atomic<int> late = 0;
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{halves{}};
    torch::optim::SGD inner{model->parameters(), 0.1};
    distributed_optimizer optimizer{inner};
    auto train_step = training_step(model, mean_of);
    train_step(torch::ones({2, edge}));
    optimizer.step();
    late += is_late(model->first) + is_late(model->second);
  });
  CHECK(late == 0);
}

TEST_CASE("a parameter that never comes is named", "[runtime][shards][R61]") {
  virtual_world_options world;
  world.config = two_replicas(true);
  std::string said;
  std::atomic<bool> updated = false;
  auto run = [&] {
    run_virtual_world(2, world, [&](session& s) {
      distributed_model model{halves{}};
      slow_sgd inner{model->parameters(), 0.1};
      distributed_optimizer optimizer{inner};
      auto train_step = training_step(model, mean_of);
      train_step(torch::ones({2, edge}));
      // Else the first one might hear of it in its own update.
      if (s.rank() == 1)
        inner.go_on = &updated;
      inner.breaks = s.rank() == 1;
      optimizer.step();
      updated = true;
      try {
        model->second.sum(); // between steps
      } catch (const error& e) {
        said = e.what();
        throw;
      }
    });
  };
  CHECK_THROWS(run());
  CHECK_THAT(said, ContainsSubstring("rank 1: ")
                     && ContainsSubstring("parameter 'second'"));
}
