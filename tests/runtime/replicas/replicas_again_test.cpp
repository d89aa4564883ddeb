#include "tests/support/catch.hpp"

#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

// A promise that does not hold, in one of several replicas whose gradients
// travel before it is known: all replicas take the step back
// (docs/data_parallel.md).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr size_t steps = 5;
constexpr size_t broken = 3;

struct job {
  bool accumulates = false; // over steps, from a tensor of ones on
  bool skips = false;       // the other replica has no samples then
  bool shards_gradients = false;
  step_options options = {};
};

/// Of a replica.
Tensor samples(uint64_t replica) {
  return torch::linspace(-1, 1.0 + static_cast<double>(replica), 12)
    .view({4, 3});
}

struct seen {
  std::vector<Tensor> here, there; // gradients after each step
  std::vector<Tensor> mean;        // of this replica
  std::vector<std::string> ran_again;
  std::vector<failure> why;
  std::vector<uint64_t> begun_early;
  int bodies = 0; // that ran in the broken step
};

/// LibTorch alone.
/// @returns by replica
std::vector<seen> train_alone(const job& x) {
  std::vector<seen> result(2);
  auto here = torch::full({3}, 2.0).requires_grad_();
  auto there = torch::ones({3}).requires_grad_();
  std::vector<torch::nn::BatchNorm1d> norms{torch::nn::BatchNorm1d{3},
                                            torch::nn::BatchNorm1d{3}};
  auto earlier = x.accumulates ? 1.0 : 0.0;
  Tensor of_here = torch::full({3}, earlier);
  Tensor of_there = of_here.clone();
  for (size_t i = 0; i < steps; ++i) {
    if (!x.accumulates) {
      of_here.zero_();
      of_there.zero_();
    }
    for (uint64_t replica = 0; replica < 2; ++replica) {
      if (x.skips && i == broken && replica == 0)
        continue;
      auto y = norms[replica]->forward(samples(replica) * here) * there * 2;
      auto loss = (y + 1).square().sum();
      auto found = torch::autograd::grad({loss}, {here, there});
      of_here += found[0] / 2;
      of_there += found[1] / 2;
    }
    for (uint64_t replica = 0; replica < 2; ++replica) {
      auto& out = result[replica];
      out.here.push_back(of_here.clone());
      out.there.push_back(of_there.clone());
      out.mean.push_back(norms[replica]->running_mean.clone());
    }
  }
  return result;
}

using batch_norm = std::shared_ptr<torch::nn::BatchNorm1dImpl>;

/// While `odd`, what requires no grad comes back as another type in the second
/// replica.
caller make_model(const std::atomic<bool>& odd, const batch_norm& norm) {
  caller result{[&odd, replica = rdp_rank()](function_impl& self, Tensor y) {
                  auto other = odd && replica == 1 && !y.requires_grad();
                  y = y * self.weight * 2;
                  return other ? y.to(torch::kDouble) : y;
                },
                [norm](caller_impl& self, Tensor y) {
                  return self.there(norm->forward(y * self.here));
                }};
  result->register_module("norm", norm);
  for (auto& p : norm->parameters())
    p.set_requires_grad(false);
  return result;
}

/// Two replicas of two ranks with default settings. In the broken step a call
/// of the second replica, after its backward, returns another type.
/// @returns by rank
std::vector<seen> train(const job& x) {
  std::vector<seen> result(4);
  auto world = manual_world(2);
  world.config.ddp = true;
  world.config.shard_optimizer_state = x.shards_gradients;
  world.config.shard_gradients = x.shards_gradients;
  std::atomic<bool> odd = false;
  run_virtual_world(4, world, [&](session& s) {
    auto& mine = result[s.rank()];
    auto replica = rdp_rank();
    auto norm = std::make_shared<torch::nn::BatchNorm1dImpl>(3);
    distributed_model model{seeded([&] { return make_model(odd, norm); })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    auto body = [&](Tensor y) {
      mine.bodies += odd;
      auto loss = (model(y) + 1).square().sum();
      model.backward(loss);
      model->there(y); // nobody waits for what this returns
      return loss;
    };
    auto train_step = step(body, x.options);
    model.partition();
    if (x.accumulates)
      for (auto& p : model.local_parameters())
        p.mutable_grad() = torch::ones_like(p);
    for (size_t i = 0; i < steps; ++i) {
      if (!x.accumulates)
        optimizer.zero_grad();
      barrier();
      odd = i == broken;
      barrier();
      failure why;
      try {
        if (x.skips && odd && replica == 0)
          train_step.skip();
        else
          train_step(samples(replica));
      } catch (const error& e) {
        why = e.cause();
      }
      mine.why.push_back(why);
      mine.ran_again.push_back(s.last_step().ran_again);
      mine.begun_early.push_back(
        model.state().buckets()->take_counts().begun_early);
      if (pp_rank() == 0)
        mine.mean.push_back(norm->running_mean.clone());
      barrier();
      check_nothing_left(s);
      for (auto& [name, g] : model.gradients())
        if (name == "here")
          mine.here.push_back(g.clone());
        else if (name == "there.weight")
          mine.there.push_back(g.clone());
    }
  });
  return result;
}

} // namespace

TEST_CASE("replicas take a step back together, whatever they had averaged",
          "[runtime][replicas][fast][auto][R42][R55]") {
  job x;
  SECTION("of one step") {}
  SECTION("added to those of earlier steps") {
    x.accumulates = true;
  }
  SECTION("with a replica that had no samples") {
    x.skips = true;
  }
  SECTION("of which each replica keeps a part") {
    x.shards_gradients = true;
  }
  auto right = train_alone(x);
  auto found = train(x);
  for (uint64_t rank = 0; rank < found.size(); ++rank) {
    auto& y = found[rank];
    auto& expected = right[rank / 2];
    for (size_t i = 0; i < steps; ++i) {
      CAPTURE(rank, i);
      INFO(y.why[i].describe());
      CHECK_FALSE(y.why[i]);
      CHECK(torch::allclose(y.here.at(i), expected.here[i], 1e-4, 1e-4));
      CHECK(torch::allclose(y.there.at(i), expected.there[i], 1e-4, 1e-4));
      if (rank % 2 == 0)
        CHECK(torch::allclose(y.mean[i], expected.mean[i]));
      CHECK(y.ran_again[i].empty() == (i != broken));
      // In the first step nobody knows when gradients are final.
      auto skipped = x.skips && i == broken && rank < 2;
      auto rounds = skipped ? 0u : i == broken ? 2u : 1u;
      if (i > 0)
        CHECK(y.begun_early[i] == rounds);
    }
    CHECK_THAT(y.ran_again[broken],
               ContainsSubstring("module there")
                 && ContainsSubstring("result 0 has dtype Double"));
    auto bodies = x.skips && rank < 2 ? 0 : 2;
    CHECK(y.bodies == (rank % 2 == 0 ? bodies : 0));
  }
}

TEST_CASE("a body that must not run twice keeps all replicas from it",
          "[runtime][replicas][fast][auto][R42]") {
  job x;
  x.options.no_rerun = true;
  for (auto& y : train(x))
    for (size_t i = 0; i < steps; ++i) {
      CHECK(y.ran_again[i].empty());
      CHECK(bool{y.why[i]} == (i == broken));
      if (i == broken)
        CHECK_THAT(y.why[i].text,
                   ContainsSubstring("result 0 has dtype Double"));
    }
}
