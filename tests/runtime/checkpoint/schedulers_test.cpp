#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

// A program with a scheduler of LibTorch goes on as docs/checkpoints.md shows.

using namespace smp;
using namespace smp::test;

namespace {

struct resumable_lr : torch::optim::StepLR {
  using StepLR::StepLR;

  void go_on_after(uint64_t steps) {
    step_count_ = static_cast<unsigned>(steps);
  }
};

double rate_of(torch::optim::Optimizer& x) {
  return x.param_groups().front().options().get_lr();
}

/// Of each step, without a line of smp.
std::vector<double> rates_alone(int steps) {
  std::vector<Tensor> parameters{torch::ones({3})};
  torch::optim::SGD sgd{parameters, 0.1};
  torch::optim::StepLR schedule{sgd, 2, 0.5};
  std::vector<double> result;
  for (int i = 0; i < steps; ++i) {
    result.push_back(rate_of(sgd));
    schedule.step();
  }
  return result;
}

/// Goes on from what is in the folder, if anything, for so many steps, and
/// saves the end.
/// @returns the rate of each step, by rank
std::vector<std::vector<double>> train(const std::string& dir, uint64_t steps) {
  std::vector<std::vector<double>> result(2);
  virtual_world_options world;
  world.config.threads = 1;
  world.config.ddp = world.config.shard_optimizer_state = true;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] {
      return function{
        [](function_impl& self, Tensor x) { return x * self.weight; }};
    })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    resumable_lr schedule{sgd, 2, 0.5};
    auto train_step = training_step(model, sum_of);
    uint64_t done = 0;
    if (auto from = resume_from_checkpoint(dir, model, {&optimizer})) {
      done = from->step;
      schedule.go_on_after(done);
    }
    for (auto end = done + steps; done < end; ++done) {
      optimizer.zero_grad();
      train_step(torch::ones({2, 3}));
      optimizer.step();
      result.at(s.rank()).push_back(rate_of(sgd));
      schedule.step();
    }
    save_checkpoint(dir, done, model, {&optimizer});
  });
  return result;
}

} // namespace

TEST_CASE("a scheduler of LibTorch goes on where it was",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  // In the middle of three rates, one of which has not had all of its steps.
  auto expected = rates_alone(7);
  REQUIRE(expected.back() == 0.25 * expected.front());
  auto found = train(dir.path, 4);
  auto rest = train(dir.path, 3);
  for (size_t rank = 0; rank < 2; ++rank) {
    auto& rates = found[rank];
    rates.insert(rates.end(), rest[rank].begin(), rest[rank].end());
    CHECK(rates == expected);
  }
}
