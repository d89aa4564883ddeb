#include "tests/support/catch.hpp"

#include "runtime/collectives/current_rank.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/replicas/gradient_shards.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/step/replicas.hpp"
#include "runtime/step/step_call.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// What gradients cost where each replica keeps a part of them, by counting
// (docs/data_parallel.md).

using namespace smp;
using namespace smp::test;

namespace {

session_config replicated(bool shards) {
  session_config x;
  x.ddp = true;
  x.threads = 1;
  x.bucket_cap_mb = 1;
  x.shard_optimizer_state = x.shard_gradients = shards;
  return x;
}

/// Of parameters, or of the rows of this rank.
uint64_t bytes_of_gradients(const distributed_model_base& model,
                            torch::optim::Optimizer& optimizer) {
  auto all = model.local_parameters();
  for (auto& group : optimizer.param_groups())
    for (auto& p : group.params())
      if (std::ranges::none_of(all, [&](auto& x) { return x.is_same(p); }))
        all.push_back(p);
  uint64_t result = 0;
  for (auto& x : all)
    if (x.grad().defined())
      result += x.grad().nbytes();
  return result;
}

constexpr int64_t layers = 6;
constexpr uint64_t layer_bytes = 1 << 20; // and a bucket

struct stack_impl : torch::nn::Module {
  stack_impl() {
    for (int64_t i = 0; i < layers; ++i)
      weights.push_back(register_parameter("weight" + std::to_string(i),
                                           torch::ones({512, 512})));
  }

  Tensor forward(Tensor x) {
    auto sum = torch::zeros({});
    for (auto& w : weights)
      sum = sum + (w * x.mean()).sum();
    return sum;
  }

  std::vector<Tensor> weights;
};
TORCH_MODULE_IMPL(stack, stack_impl);

void await_sums(gradient_buckets& x) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{20};
  while (x.shards().under_way() > 0) {
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error{"sums did not come"};
    std::this_thread::yield();
  }
}

void end_step(replicas& others, model_state& model) {
  auto why = others.hear(&model, {}).why;
  others.end_step(&model, why);
  if (why)
    throw error{why};
}

struct gradient_bytes {
  uint64_t peak = 0;
  uint64_t after = 0;
};

/// Two replicas in lockstep: gradients of one layer after the other, of two
/// microbatches. @returns what each had in any of three steps, the first one
/// included, and after the last one
std::vector<gradient_bytes> count_bytes(bool shards) {
  std::vector<gradient_bytes> result(2);
  virtual_world_options world;
  world.config = replicated(shards);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return stack{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    model.partition();
    auto& buckets = *model.state().buckets();
    replicas others{current_rank()};
    auto& mine = result[s.rank()];
    for (auto i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      others.begin_step(model.state(), {.microbatches = 2});
      for (auto microbatch = 0; microbatch < 2; ++microbatch)
        for (auto layer = layers; layer-- > 0;) {
          auto factor = static_cast<double>(s.rank() + 1);
          (model->weights[static_cast<size_t>(layer)] * factor)
            .sum()
            .backward();
          barrier();
          await_sums(buckets);
        }
      end_step(others, model.state());
    }
    mine.peak = buckets.take_counts().peak_bytes;
    mine.after = bytes_of_gradients(model, sgd);
    for (auto& [name, g] : model.gradients())
      if (!g.eq(3).all().item<bool>())
        throw std::runtime_error{name + " has the wrong gradient"};
    optimizer.step();
    for (auto& w : model->weights)
      if (!torch::allclose(w, torch::full({512, 512}, 0.7)))
        throw std::runtime_error{"a wrong update"};
  });
  return result;
}

// -- bits ---------------------------------------------------------------------

/// Who computes first.
enum class turns { together, first_replica, last_replica };

Tensor drawn(uint64_t replica, int64_t microbatch, int64_t layer) {
  auto stream = static_cast<int64_t>(replica) + 2 * microbatch + 4 * layer;
  auto numbers = torch::arange(512.0 * 512.0, torch::kDouble) * (stream + 1);
  return torch::sin(numbers).to(torch::kFloat).view({512, 512});
}

/// What two replicas, whose gradients are drawn, have of the first layers of
/// the stack after a step of two microbatches.
std::vector<Tensor> sums_of(turns order) {
  std::vector<Tensor> result;
  virtual_world_options world;
  world.config = replicated(true);
  world.config.deterministic_server = true;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return stack{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    model.partition();
    auto& buckets = *model.state().buckets();
    replicas others{current_rank()};
    others.begin_step(model.state(), {.microbatches = 2});
    auto late = order == turns::first_replica ? 1u : 0u;
    if (order != turns::together && s.rank() == late)
      barrier(); // the other one has begun all that it can
    for (auto microbatch = 0; microbatch < 2; ++microbatch)
      for (auto layer = layers; layer-- > 0;) {
        auto& w = model->weights[static_cast<size_t>(layer)];
        (w * drawn(s.rank(), microbatch, layer)).sum().backward();
        if (order == turns::together) {
          barrier();
          await_sums(buckets);
        }
      }
    if (order != turns::together && s.rank() != late)
      barrier();
    end_step(others, model.state());
    auto gradients = model.gradients(); // collective
    if (s.rank() == 0)
      for (auto& [name, g] : gradients)
        result.push_back(g);
  });
  return result;
}

// -- what a program says about gradients --------------------------------------

/// Replicas, whose gradients are 1/3 on the first one and 1 on all others.
struct hooked_step {
  std::vector<uint64_t> bytes; // that each sent in a step
  Tensor gradient;             // of each number of the first layer
};

hooked_step step_with(comm_hook hook, bool shards, uint64_t ranks = 2,
                      uint64_t bucket_cap_mb = 1) {
  hooked_step result;
  result.bytes.resize(ranks);
  virtual_world_options world;
  world.config = replicated(shards);
  world.config.bucket_cap_mb = bucket_cap_mb;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return stack{}; })};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    model.register_comm_hook(hook);
    model.partition();
    auto train_step = training_step(model);
    auto& fabric = s.internals().fabric();
    auto before = fabric.stats().bytes_sent;
    train_step(torch::full({2}, s.rank() == 0 ? 1.0 / 3 : 1.0));
    barrier(); // what this rank has to send may wait longer than its own sums
    result.bytes[s.rank()] = fabric.stats().bytes_sent - before;
    auto gradients = model.gradients(); // collective
    if (s.rank() == 0)
      result.gradient = gradients.front().second;
  });
  return result;
}

/// Two replicas, whose gradients are 4 and 12, keep parts of them.
/// @returns by rank, the gradient after three steps, of which two are in a
/// scope of no_sync, and then a weight, which was 1; then of one step more
std::vector<std::vector<double>> train_unsynced() {
  std::vector<std::vector<double>> result(2);
  virtual_world_options world;
  world.config = replicated(true);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] {
      return function{[](auto& self, Tensor x) { return x * self.weight; }};
    })};
    torch::optim::SGD sgd{model->parameters(), 0.125};
    distributed_optimizer optimizer{sgd};
    auto train_step = training_step(model, sum_of);
    auto x = torch::full({2, 3}, 2.0 + 4.0 * static_cast<double>(s.rank()));
    auto& mine = result[s.rank()];
    auto note = [&](const Tensor& y) {
      for (int64_t i = 0; i < 3; ++i)
        if (!y[i].eq(y[0]).item<bool>())
          throw std::runtime_error{"rows differ"};
      mine.push_back(y[0].item<double>());
    };
    for (auto unsynced : {2, 0}) {
      optimizer.zero_grad();
      for (auto i = 0; i < unsynced; ++i) {
        auto scope = model.no_sync();
        train_step(x);
      }
      train_step(x);
      note(model.gradients().front().second);
      optimizer.step();
      note(model->weight.detach());
    }
  });
  return result;
}

// -- an optimizer of a part of the model --------------------------------------

/// [4, 4]
Tensor samples() {
  return torch::sin(torch::arange(16.0).view({4, 4})).to(torch::kFloat);
}

/// Two replicas, each with one layer a rank; an optimizer has one layer's
/// parameters. @returns by rank, the norm of all gradients before they were
/// clipped and after
std::vector<std::pair<double, double>> norms_of(bool first_layer,
                                                bool shards_gradients) {
  std::vector<std::pair<double, double>> result(4);
  virtual_world_options world;
  world.config = replicated(true);
  world.config.shard_gradients = shards_gradients;
  world.config.pipeline_parallel_degree = 2;
  world.config.auto_partition = false;
  world.config.stall_timeout = 20; // of ranks that wait in two groups
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{seeded([] { return two_layers{4, 3}; })};
    set_partition(*model->second, 1);
    torch::optim::SGD sgd{first_layer ? model->first->parameters()
                                      : model->second->parameters(),
                          0.1};
    distributed_optimizer optimizer{sgd};
    auto train_step = training_step(model, mean_square_of);
    train_step(samples().chunk(2).at(dp_rank()));
    auto before = clip_grad_norm_(model, 1e-3);
    result[s.rank()] = {before, clip_grad_norm_(model, 1e9)};
    if (any_nonfinite(model))
      throw std::runtime_error{"not finite"};
    optimizer.step();
  });
  return result;
}

double norm_alone() {
  auto model = seeded([] { return two_layers_of<as_is>{4, 3}; });
  model.forward(samples()).square().mean().backward();
  auto squares = 0.0;
  for (auto& p : model.parameters())
    squares += p.grad().square().sum().item<double>();
  return std::sqrt(squares);
}

} // namespace

TEST_CASE("norms count ranks of whose parameters no optimizer has any",
          "[runtime][gradient_shards][R22]") {
  auto first_layer = GENERATE(false, true);
  auto shards_gradients = GENERATE(false, true);
  CAPTURE(first_layer, shards_gradients);
  for (auto [before, after] : norms_of(first_layer, shards_gradients)) {
    CHECK(before == Catch::Approx(norm_alone()).epsilon(1e-5));
    CHECK(after == Catch::Approx(1e-3).epsilon(1e-2));
  }
}

TEST_CASE("replicas that keep parts have the mean of all that no_sync left",
          "[runtime][gradient_shards][R53][R55]") {
  // The mean of 4 and 12, three times, and then once.
  for (auto& x : train_unsynced())
    CHECK(x == std::vector<double>{24, -2, 8, -3});
}

TEST_CASE("a comm hook halves the bytes that replicas send",
          "[runtime][gradient_shards]") {
  auto shards = GENERATE(false, true);
  auto exact = step_with(comm_hook::allreduce, shards);
  for (auto [hook, digits] : {std::pair{comm_hook::fp16_compress, 1e-3},
                              std::pair{comm_hook::bf16_compress, 1e-2}}) {
    CAPTURE(shards, digits);
    auto fewer = step_with(hook, shards);
    for (size_t rank = 0; rank < 2; ++rank) {
      auto most = static_cast<double>(exact.bytes[rank]);
      // A half of each bucket to the other one, or that and its sum.
      auto least = (shards ? 0.5 : 1.0) * layers * layer_bytes;
      CHECK(most >= least);
      CHECK(most <= 1.02 * least);
      CHECK(static_cast<double>(fewer.bytes[rank]) <= 0.52 * most);
      CHECK(static_cast<double>(fewer.bytes[rank]) >= 0.48 * most);
    }
    auto off = (fewer.gradient - 2.0 / 3).abs().max().item<double>();
    CHECK(off < digits);
    CHECK(off > 1e-6);
  }
}

TEST_CASE("each rank sends the others' parts of a bucket that all own alike",
          "[runtime][gradient_shards][R53]") {
  // All layers, and each of four has a quarter.
  auto found = step_with(comm_hook::allreduce, true, 4, layers);
  auto least = 0.75 * layers * layer_bytes;
  for (auto sent : found.bytes) {
    CHECK(static_cast<double>(sent) >= least);
    CHECK(static_cast<double>(sent) <= 1.02 * least);
  }
  auto off = (found.gradient - 2.5 / 3).abs().max().item<double>();
  CHECK(off < 1e-6);
}

TEST_CASE("a replica keeps its part of the gradients, and one bucket",
          "[runtime][gradient_shards][R53]") {
  for (auto& x : count_bytes(false)) {
    CHECK(x.peak == layers * layer_bytes);
    CHECK(x.after == layers * layer_bytes);
  }
  for (auto& x : count_bytes(true)) {
    CHECK(x.peak <= layers / 2 * layer_bytes + layer_bytes);
    CHECK(x.after == layers / 2 * layer_bytes);
  }
}

TEST_CASE("nobody waits for a sum that cannot be made",
          "[runtime][gradient_shards]") {
  virtual_world_options world;
  world.config = replicated(true);
  run_virtual_world(2, world, [](session& s) {
    auto parameter = torch::zeros({4}, torch::kComplexFloat);
    auto rows = parameter.narrow(0, 2 * static_cast<int64_t>(s.rank()), 2);
    gradient_shards shards{current_rank()};
    optimizer_shards::owners x{parameter, comm_group::dp, {0, 2, 4}, rows};
    shards.add({x});
    auto told = error_of(
      [&] {
        shards.begin({parameter}, torch::ones_like(parameter),
                     comm_hook::allreduce, comm_group::dp, "sums");
      },
      error_code::unsupported);
    if (told.find("no mean of complex64") == told.npos)
      throw std::runtime_error{told};
    if (shards.bytes_under_way() > 0)
      throw std::runtime_error{"it is under way"};
    shards.collect(true);
  });
}

TEST_CASE("deterministic sums do not depend on which replica is ahead",
          "[runtime][gradient_shards][deterministic][R53]") {
  auto order = GENERATE(turns::together, turns::first_replica,
                        turns::last_replica);
  CAPTURE(static_cast<int>(order));
  auto sums = sums_of(order);
  REQUIRE(sums.size() == static_cast<size_t>(layers));
  for (int64_t layer = 0; layer < layers; ++layer) {
    auto mean = [&](int64_t microbatch) {
      return (drawn(0, microbatch, layer) + drawn(1, microbatch, layer)) / 2;
    };
    CHECK(torch::equal(sums[static_cast<size_t>(layer)], mean(0) + mean(1)));
  }
}
