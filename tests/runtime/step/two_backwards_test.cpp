#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A body that calls a module with state after its first backward, as that of a
// GAN may: its microbatches overlap no more, and the running statistics are
// those of one process (R19).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 3;
constexpr uint64_t microbatches = 4;

struct critic_impl : torch::nn::Module {
  critic_impl() {
    register_module("fc", fc);
    register_module("norm", norm);
  }

  Tensor forward(Tensor x) {
    return norm(fc(x));
  }

  torch::nn::Linear fc{width, width};
  torch::nn::BatchNorm1d norm{width};
};
TORCH_MODULE_IMPL(critic, critic_impl);

/// What judges is on rank 1, what it judges on rank 0.
struct rivals_impl : torch::nn::Module {
  rivals_impl() {
    register_module("made", made);
    partition_scope on_rank_1{1};
    judge = submodule<critic>{};
    register_module("judge", judge);
  }

  torch::nn::Linear made{width, width};
  submodule<critic> judge = nullptr;
};
TORCH_MODULE_IMPL(rivals, rivals_impl);

/// Microbatches differ, so that their order shows in the running mean.
Tensor batch() {
  auto x = torch::arange(16.0 * width).remainder(11).view({16, width});
  return x * torch::arange(1.0, 17.0).view({16, 1}) / 16;
}

/// What is known after a step, on every rank the same.
struct seen_step {
  failure why;
  std::string ran_again;
  bool replayed = false;
  double loss = 0;
  std::map<std::string, Tensor> gradients, state;
};

std::map<std::string, Tensor> copied(const named_tensors& xs) {
  std::map<std::string, Tensor> result;
  for (auto& [name, x] : xs)
    result[name] = x.detach().clone();
  return result;
}

/// Runs each step until it has no error.
/// @returns what pp_rank 0 saw, with the steps that failed
std::vector<seen_step> run(const virtual_world_options& world, int steps) {
  std::vector<seen_step> result;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return rivals{}; })};
    auto train_step = step([&](Tensor x) {
      auto real = model->judge(x).sigmoid().mean();
      model.backward(real);
      auto fake = model->judge(model->made(x)).sin().mean();
      model.backward(fake);
      return (real + fake).detach();
    });
    model.partition();
    for (int done = 0, tries = 0; done < steps; ++tries) {
      if (tries > 2 * steps)
        throw std::runtime_error{"it never gets right"};
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      seen_step x;
      try {
        x.loss = train_step(batch()).reduce_mean().item<double>();
        ++done;
      } catch (const error& e) {
        x.why = e.cause();
      }
      x.ran_again = s.last_step().ran_again;
      x.replayed = s.last_step().replayed;
      barrier();
      check_nothing_left(s);
      x.gradients = copied(model.gradients());
      x.state = copied(model.state_dict());
      if (s.rank() == 0)
        result.push_back(std::move(x));
    }
  });
  return result;
}

/// The same in one process, by LibTorch alone.
std::vector<seen_step> plain(int steps) {
  auto made = seeded([] { return rivals{}; });
  auto judge = [&](const Tensor& x) { return made->judge->forward(x); };
  std::vector<seen_step> result;
  for (int i = 0; i < steps; ++i) {
    made->zero_grad();
    auto& y = result.emplace_back();
    for (auto& x : batch().chunk(microbatches)) {
      auto real = judge(x).sigmoid().mean() / double{microbatches};
      real.backward();
      auto fake = judge(made->made(x)).sin().mean() / double{microbatches};
      fake.backward();
      y.loss += (real + fake).item<double>();
    }
    for (auto& p : made->named_parameters())
      y.gradients[p.key()] = p.value().grad().clone();
    for (auto& p : made->named_buffers())
      y.state[p.key()] = p.value().clone();
  }
  return result;
}

void check_close(const std::map<std::string, Tensor>& xs,
                 const std::map<std::string, Tensor>& right) {
  for (auto& [name, y] : right) {
    INFO(name);
    CHECK(torch::allclose(xs.at(name), y, 1e-4, 1e-5));
  }
}

/// @returns the steps that failed
std::vector<seen_step> check_steps(const std::vector<seen_step>& found,
                                   int steps) {
  auto right = plain(steps);
  std::vector<seen_step> failed;
  size_t done = 0;
  for (auto& x : found) {
    if (x.why) {
      // It left no trace but gradients.
      if (done > 0)
        check_close(x.state, right[done - 1].state);
      failed.push_back(x);
      continue;
    }
    INFO("step " << done + 1 << ": " << x.ran_again);
    auto& y = right.at(done++);
    CHECK(std::abs(x.loss - y.loss) < 1e-5 * (1 + std::abs(y.loss)));
    check_close(x.gradients, y.gradients);
    check_close(x.state, y.state);
  }
  CHECK(done == right.size());
  return failed;
}

auto told() {
  return ContainsSubstring("calls it after its first model.backward");
}

} // namespace

TEST_CASE("two backwards over a batch norm run again, one by one from then on",
          "[runtime][auto][R19][R42]") {
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b");
  auto world = manual_world(2, microbatches);
  world.config.pipeline = pipeline;
  world.seed = GENERATE(1u, 2u);
  INFO(pipeline << ", seed " << world.seed);
  auto found = run(world, 4);
  CHECK(check_steps(found, 4).empty());
  // All forward phases come first there, so the others have been there.
  if (pipeline == "simple")
    CHECK_THAT(found[0].ran_again, told());
  for (size_t i = 1; i < found.size(); ++i)
    if (!found[0].ran_again.empty())
      CHECK(found[i].ran_again.empty());
}

TEST_CASE("where a step cannot run again two backwards are an error once",
          "[runtime][fast][R19]") {
  auto fast = GENERATE(true, false);
  auto world = manual_world(2, microbatches);
  world.config.pipeline = "simple";
  world.config.fast_mode = fast;
  auto found = run(world, 3);
  auto failed = check_steps(found, 3);
  REQUIRE(failed.size() == 1);
  CHECK(found[0].why == failed[0].why);
  CHECK(failed[0].why.code == error_code::unsupported);
  CHECK(failed[0].why.rank == rank_id{1});
  CHECK(failed[0].why.module == "judge");
  CHECK_THAT(failed[0].why.text, told());
  CHECK(failed[0].state.at("judge.norm.num_batches_tracked").item<int>() == 0);
}

TEST_CASE("two backwards are right where one microbatch is active",
          "[runtime][R19]") {
  auto world = manual_world(2, microbatches);
  world.config.active_microbatches = 1;
  auto found = run(world, 3);
  CHECK(check_steps(found, 3).empty());
  for (auto& x : found)
    CHECK(x.ran_again.empty());
}

TEST_CASE("steps of two backwards are replayed one by one",
          "[runtime][static][deterministic][R19][R33]") {
  auto fixed_order = GENERATE(true, false);
  INFO("fixed order: " << fixed_order);
  auto world = manual_world(2, microbatches);
  world.config.static_mode = !fixed_order;
  if (!fixed_order)
    world.config.static_steps = 1;
  world.config.deterministic_server = fixed_order;
  world.config.fast_mode = false;
  auto found = run(world, 6);
  auto failed = check_steps(found, 6);
  // The step from which an order is computed shows the late calls.
  CHECK(failed.size() <= (fixed_order ? 0u : 1u));
  CHECK(found.back().replayed);
}
