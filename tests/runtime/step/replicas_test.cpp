#include "tests/support/catch.hpp"

#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

// Replicas of a model, each in a pipeline of its own: together they compute
// what one process computes of the whole batch (docs/data_parallel.md).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 50;
constexpr int64_t width = 6;
constexpr uint64_t microbatches = 2;

/// Uses one of two towers, as the data say; `never` has no gradient anywhere.
template <template <class> class P>
struct towers_impl : torch::nn::Module {
  explicit towers_impl(bool sparse)
    : table(torch::nn::EmbeddingOptions(words, width).sparse(sparse)) {
    register_module("table", table);
    register_module("even", even);
    register_module("odd", odd);
    register_module("never", never);
    register_module("head", head);
  }

  Tensor forward(Tensor x) {
    auto h = table(x).mean(1);
    h = x[0][0].template item<int64_t>() % 2 == 0 ? even(h) : odd(h).tanh();
    return head(h).square().mean();
  }

  P<torch::nn::Embedding> table;
  P<torch::nn::Linear> even{width, width}, odd{width, width};
  P<torch::nn::Linear> never{width, width}, head{width, 1};
};

struct pipelined_impl : towers_impl<submodule> {
  using towers_impl::towers_impl;
};
TORCH_MODULE_IMPL(pipelined, pipelined_impl);

template <class H>
using plain = H;

/// [4 * replicas, 3]: of each replica only even numbers or only odd ones.
Tensor data_of(uint64_t replicas, int64_t step) {
  auto rows = static_cast<int64_t>(4 * replicas);
  auto x = torch::arange(rows * 3).view({rows, 3}) * 14 + 2 * step;
  auto replica = torch::arange(rows).div(4, "floor").view({rows, 1});
  return (x + replica) % words;
}

/// Gradients of each step and the parameters at its end, of all replicas.
struct training {
  std::vector<numbers> gradients;
  std::vector<numbers> parameters;
};

/// One process, no line of smp: microbatches of all replicas one after the
/// other.
training train_alone(uint64_t replicas, bool sparse, int64_t steps) {
  auto model = seeded([&] { return towers_impl<plain>{sparse}; });
  torch::optim::SGD sgd{model.parameters(), 0.5};
  training result;
  for (int64_t i = 0; i < steps; ++i) {
    sgd.zero_grad();
    auto parts = data_of(replicas, i)
                   .chunk(static_cast<int64_t>(replicas * microbatches));
    for (auto& x : parts)
      (model.forward(x) / static_cast<double>(parts.size())).backward();
    auto& gradients = result.gradients.emplace_back();
    auto& parameters = result.parameters.emplace_back();
    for (auto& x : model.named_parameters())
      if (x.value().grad().defined())
        gradients.emplace(x.key(), x.value().grad().to_dense().clone());
    sgd.step();
    for (auto& x : model.named_parameters())
      parameters.emplace(x.key(), x.value().detach().clone());
  }
  return result;
}

session_config grid(uint64_t pipeline) {
  session_config result;
  result.pipeline_parallel_degree = pipeline;
  result.microbatches = microbatches;
  result.ddp = true;
  result.threads = 1;
  return result;
}

/// @returns what each replica has, by dp_rank
std::vector<training> train_replicas(uint64_t pipeline, uint64_t replicas,
                                     bool sparse, int64_t steps) {
  std::vector<training> result(replicas);
  std::mutex mutex;
  virtual_world_options world;
  world.config = grid(pipeline);
  world.reorder = true;
  run_virtual_world(pipeline * replicas, world, [&](session&) {
    distributed_model model{seeded([&] { return pipelined{sparse}; })};
    torch::optim::SGD sgd{model->parameters(), 0.5};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    for (int64_t i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      auto part = data_of(replicas, i)
                    .chunk(static_cast<int64_t>(replicas))
                    .at(dp_rank());
      train_step(part);
      numbers gradients;
      for (auto& [name, x] : model.local_named_parameters())
        if (x.grad().defined()) {
          if (name == "table.weight" && x.grad().is_sparse() != sparse)
            throw std::runtime_error{"a gradient changed its layout"};
          gradients.emplace(name, x.grad().to_dense().clone());
        }
      optimizer.step();
      auto state = model.local_named_parameters();
      std::unique_lock guard{mutex};
      auto& mine = result[dp_rank()];
      mine.gradients.resize(static_cast<size_t>(steps));
      mine.parameters.resize(static_cast<size_t>(steps));
      mine.gradients[static_cast<size_t>(i)].merge(gradients);
      for (auto& [name, x] : state)
        mine.parameters[static_cast<size_t>(i)].emplace(name,
                                                        x.detach().clone());
    }
  });
  return result;
}

} // namespace

TEST_CASE("replicas compute what one process does of the whole batch",
          "[runtime][replicas]") {
  auto [pipeline, replicas] = GENERATE(std::pair{1u, 2u}, std::pair{2u, 2u},
                                       std::pair{1u, 3u}, std::pair{2u, 3u});
  auto sparse = GENERATE(false, true);
  CAPTURE(pipeline, replicas, sparse);
  constexpr int64_t steps = 4;
  auto expected = train_alone(replicas, sparse, steps);
  auto mine = train_replicas(pipeline, replicas, sparse, steps);
  for (size_t i = 0; i < steps; ++i) {
    INFO("step " << i);
    CHECK_FALSE(mine[0].gradients[i].contains("never.weight"));
    check_near(mine[0].gradients[i], expected.gradients[i]);
    check_near(mine[0].parameters[i], expected.parameters[i]);
    // The same bits everywhere, or replicas would part.
    for (auto& other : mine)
      for (auto& [name, x] : mine[0].parameters[i])
        CHECK(torch::equal(other.parameters[i].at(name), x));
  }
}

TEST_CASE("gradients add up over steps, and evaluation leaves them alone",
          "[runtime][replicas]") {
  virtual_world_options world;
  world.config = grid(1);
  std::mutex mutex;
  std::vector<std::vector<Tensor>> seen(2); // by rank: after each step
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] {
      return function{[](auto& self, Tensor x) { return x * self.weight; }};
    })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    auto look = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x).sum();
    });
    auto note = [&] {
      std::unique_lock guard{mutex};
      seen[s.rank()].push_back(model->weight.grad().clone());
    };
    auto x = torch::full({2, 3}, 2.0 + 4.0 * static_cast<double>(s.rank()));
    train_step(x);
    note(); // the mean of 2 and 6
    look(x);
    note();
    train_step(x);
    note();
  });
  for (auto& of_rank : seen) {
    REQUIRE(of_rank.size() == 3);
    CHECK(of_rank[0].eq(4).all().item<bool>());
    CHECK(of_rank[1].eq(4).all().item<bool>());
    CHECK(of_rank[2].eq(8).all().item<bool>());
  }
}

TEST_CASE("a step that fails in one replica fails in all of them, by name",
          "[runtime][replicas][R6]") {
  virtual_world_options world;
  world.config = grid(2);
  std::mutex mutex;
  std::map<uint64_t, failure> failures;
  std::map<uint64_t, Tensor> gradients;
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{seeded([] { return pipelined{false}; })};
    auto bad = false;
    auto train_step = step([&](Tensor x) {
      if (bad && dp_rank() == 1)
        throw std::runtime_error{"no more data"};
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    auto x = data_of(2, 0).chunk(2).at(dp_rank());
    train_step(x);
    bad = true;
    try {
      train_step(x);
    } catch (const error& e) {
      std::unique_lock guard{mutex};
      failures.emplace(s.rank(), e.cause());
    }
    bad = false;
    for (auto& p : model.local_parameters())
      p.mutable_grad() = Tensor{};
    train_step(x); // they are still in step
    auto whole = model.gradients();
    std::unique_lock guard{mutex};
    for (auto& [name, t] : whole)
      if (name == "head.weight")
        gradients.emplace(s.rank(), t);
  });
  REQUIRE(failures.size() == 4);
  for (auto& [rank, x] : failures) {
    CAPTURE(rank, x.describe());
    CHECK(x.code == error_code::user_code);
    CHECK(x.text.find("no more data") != std::string::npos);
    CHECK(x.rank == failures.at(0).rank);
  }
  // Ranks 2 and 3 are the second replica.
  CHECK((failures.at(0).rank == rank_id{2}));
  REQUIRE(gradients.size() == 4);
  for (auto& [rank, x] : gradients)
    CHECK(torch::equal(x, gradients.at(0)));
}
