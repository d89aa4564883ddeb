#include "tests/support/catch.hpp"

#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/adagrad.h>
#include <torch/utils.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Adagrad in a program of the user's, whose replicas share its sums.

using namespace smp;
using namespace smp::test;

namespace {

using torch::optim::AdagradOptions;
using torch::optim::OptimizerParamGroup;

constexpr int64_t width = 256;
constexpr int64_t weight_bytes = 4 * width * width;

struct two_weights_impl : torch::nn::Module {
  two_weights_impl()
    : first(register_parameter("first", drawn(1))),
      second(register_parameter("second", drawn(2))) {
    // nop
  }

  static Tensor drawn(double factor) {
    auto x = torch::arange(1.0 * width * width, torch::kDouble) * factor;
    return (torch::sin(x) * 0.05).to(torch::kFloat).view({width, width});
  }

  /// @param x [n, width]
  Tensor forward(Tensor x) {
    auto y = torch::tanh(torch::tanh(x.mm(first)).mm(second));
    return 1000 * y.square().mean(); // so that weights change
  }

  Tensor first, second;
};
TORCH_MODULE_IMPL(two_weights, two_weights_impl);

AdagradOptions options() {
  AdagradOptions x{0.1};
  x.initial_accumulator_value(0.5);
  x.eps(1.0); // else the last place of a small gradient decides its sign
  return x;
}

/// The second one has a rate of its own.
std::vector<OptimizerParamGroup> groups_of(const Tensor& first,
                                           const Tensor& second) {
  auto slow = std::make_unique<AdagradOptions>(options());
  slow->lr(0.02);
  std::vector<OptimizerParamGroup> result;
  result.emplace_back(std::vector<Tensor>{first});
  result.emplace_back(std::vector<Tensor>{second}, std::move(slow));
  return result;
}

/// [8, width]
Tensor data_of(int64_t step) {
  return torch::sin(torch::arange(8.0 * width).view({8, width}) * 0.01 + step)
    .to(torch::kFloat);
}

constexpr int64_t steps = 3;

numbers train_alone() {
  two_weights_impl model;
  torch::optim::Adagrad adagrad{groups_of(model.first, model.second),
                                options()};
  for (int64_t i = 0; i < steps; ++i) {
    adagrad.zero_grad();
    model.forward(data_of(i)).backward();
    adagrad.step();
  }
  return {{"first", model.first.detach()}, {"second", model.second.detach()}};
}

struct adagrad_run {
  std::vector<live_bytes> bytes; // by rank: until the partition is done
  std::vector<numbers> parameters;
};

adagrad_run train_replicas() {
  adagrad_run result;
  result.bytes.resize(2);
  result.parameters.resize(2);
  virtual_world_options world;
  world.config.threads = 1;
  world.config.ddp = world.config.shard_optimizer_state = true;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return two_weights{}; })};
    auto bytes = std::make_shared<live_bytes>();
    std::unique_ptr<torch::optim::Adagrad> adagrad;
    std::optional<distributed_optimizer> optimizer;
    {
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      adagrad = make_adagrad(groups_of(model->first, model->second), options());
      optimizer.emplace(*adagrad);
      model.partition();
    }
    result.bytes[s.rank()] = *bytes;
    auto train_step = training_step(model);
    for (int64_t i = 0; i < steps; ++i) {
      optimizer->zero_grad();
      train_step(data_of(i).chunk(2).at(dp_rank()));
      optimizer->step();
    }
    auto state = model.state_dict();
    result.parameters[s.rank()] = {state.begin(), state.end()};
  });
  return result;
}

} // namespace

TEST_CASE("a program's Adagrad makes the sums of what a replica updates",
          "[runtime][optimizer][memory]") {
  constexpr int64_t small = 64 << 10;
  auto expected = train_alone();
  auto mine = train_replicas();
  for (size_t rank = 0; rank < 2; ++rank) {
    auto& bytes = mine.bytes[rank];
    CHECK(bytes.now <= weight_bytes + small);
    CHECK(bytes.peak <= 2 * weight_bytes + small);
    check_near(mine.parameters[rank], expected, {.least = 1e-5});
  }
}
