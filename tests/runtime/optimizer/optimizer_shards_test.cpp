#include "tests/support/catch.hpp"

#include "runtime/collectives/current_rank.hpp"
#include "runtime/optimizer/optimizer_shards.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

// Replicas that share the optimizer's state (docs/data_parallel.md).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 50;
constexpr int64_t width = 6;
constexpr uint64_t microbatches = 2;

/// Parameters of all kinds: rows that do not divide, one row, no axis, one that
/// has no gradient, and a large one.
template <template <class> class P>
struct mixture_impl : torch::nn::Module {
  mixture_impl(bool sparse, int64_t inner)
    : table(torch::nn::EmbeddingOptions(words, width).sparse(sparse)),
      up(width, inner),
      down(inner, 1) {
    register_module("table", table);
    register_module("up", up);
    register_module("down", down);
    register_module("never", never);
    scale = register_parameter("scale", torch::full({}, 0.5));
  }

  Tensor forward(Tensor x) {
    auto h = table(x).mean(1);
    return (down(torch::tanh(up(h))) * scale).square().mean();
  }

  P<torch::nn::Embedding> table;
  P<torch::nn::Linear> up, down, never{3, 3};
  Tensor scale;
};

struct distributed_mixture_impl : mixture_impl<submodule> {
  using mixture_impl::mixture_impl;
};
TORCH_MODULE_IMPL(distributed_mixture, distributed_mixture_impl);

using parameters = std::vector<Tensor>;
using optimizer_ptr = std::unique_ptr<torch::optim::Optimizer>;
using maker = std::function<optimizer_ptr(const parameters&)>;

/// As LibTorch makes them, with all that they can remember.
const std::map<std::string, maker> makers = {
  {"sgd",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(
       x, torch::optim::SGDOptions(0.3).momentum(0.9));
   }},
  {"sgd of sparse gradients",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(x,
                                                torch::optim::SGDOptions(0.3));
   }},
  {"adam",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::Adam>(
       x, torch::optim::AdamOptions(0.01).amsgrad(true));
   }},
  {"adamw",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::AdamW>(
       x, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
   }},
  {"adagrad",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::Adagrad>(
       x, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.1));
   }},
  {"rmsprop",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::RMSprop>(
       x, torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
   }},
};

struct job {
  std::string optimizer = "adamw";
  uint64_t pipeline = 1;
  uint64_t replicas = 2;
  uint64_t tensor = 1;
  int64_t inner = 32;
  int64_t steps = 4;
  bool sparse() const {
    return optimizer.find("sparse") != std::string::npos;
  }
};

Tensor data_of(uint64_t replicas, int64_t step) {
  auto rows = static_cast<int64_t>(4 * replicas);
  return (torch::arange(rows * 3).view({rows, 3}) * 7 + 11 * step) % words;
}

/// One process, no line of smp. @returns the parameters after each step
std::vector<numbers> train_alone(const job& x) {
  auto model = seeded([&] { return mixture_impl<as_is>{x.sparse(), x.inner}; });
  auto optimizer = makers.at(x.optimizer)(model.parameters());
  std::vector<numbers> result;
  for (int64_t i = 0; i < x.steps; ++i) {
    optimizer->zero_grad();
    auto parts = data_of(x.replicas, i)
                   .chunk(static_cast<int64_t>(x.replicas * microbatches));
    for (auto& part : parts)
      (model.forward(part) / static_cast<double>(parts.size())).backward();
    optimizer->step();
    auto& after = result.emplace_back();
    for (auto& p : model.named_parameters())
      after.emplace(p.key(), p.value().detach().clone());
  }
  return result;
}

struct sharded_run {
  /// By dp_rank, after each step.
  std::vector<std::vector<numbers>> parameters;
  /// By rank: bytes of parameters that its optimizer updates.
  std::vector<uint64_t> updated;
};

uint64_t bytes_of(torch::optim::Optimizer& x) {
  uint64_t result = 0;
  for (auto& group : x.param_groups())
    for (auto& p : group.params())
      result += p.nbytes();
  return result;
}

session_config config_of(const job& x) {
  session_config result;
  result.pipeline_parallel_degree = x.pipeline;
  result.tensor_parallel_degree = x.tensor;
  result.microbatches = microbatches;
  result.ddp = true;
  result.shard_optimizer_state = true;
  result.threads = 1;
  return result;
}

sharded_run train_sharded(const job& x) {
  sharded_run result;
  result.parameters.resize(x.replicas,
                           std::vector<numbers>(static_cast<size_t>(x.steps)));
  result.updated.resize(x.pipeline * x.replicas);
  std::mutex mutex;
  virtual_world_options world;
  world.config = config_of(x);
  world.reorder = true;
  run_virtual_world(x.pipeline * x.replicas, world, [&](session& s) {
    distributed_model model{seeded([&] {
      return distributed_mixture{x.sparse(), x.inner};
    })};
    if (x.tensor > 1)
      set_tensor_parallelism(*model->up);
    auto inner = makers.at(x.optimizer)(model->parameters());
    distributed_optimizer optimizer{*inner};
    auto train_step = training_step(model);
    for (int64_t i = 0; i < x.steps; ++i) {
      optimizer.zero_grad();
      for (auto& [name, p] : model.local_named_parameters())
        if (p.grad().defined())
          throw std::runtime_error{"a gradient is still there: " + name};
      train_step(data_of(x.replicas, i)
                   .chunk(static_cast<int64_t>(x.replicas))
                   .at(dp_rank()));
      optimizer.step();
      auto after = model.state_dict();
      std::unique_lock guard{mutex};
      result.parameters[dp_rank()][static_cast<size_t>(i)].insert(after.begin(),
                                                                  after.end());
      result.updated[s.rank()] = bytes_of(*inner);
    }
  });
  return result;
}

void check(const job& x) {
  CAPTURE(x.optimizer, x.pipeline, x.replicas, x.tensor);
  auto expected = train_alone(x);
  auto mine = train_sharded(x);
  for (size_t i = 0; i < expected.size(); ++i)
    for (auto& replica : mine.parameters) {
      INFO("step " << i);
      // Only the ranks that hold the model together have all of it.
      if (!replica[i].empty())
        check_near(replica[i], expected[i], {.least = 1e-6});
      for (auto& [name, p] : replica[i])
        if (!mine.parameters[0][i].empty())
          CHECK(torch::equal(p, mine.parameters[0][i].at(name)));
    }
}

} // namespace

TEST_CASE("rows are dealt out evenly, in order, and none is left",
          "[runtime][shards]") {
  std::mt19937 random{7};
  auto below = [&](uint64_t x) { return random() % x; };
  for (int round = 0; round < 300; ++round) {
    auto ranks = 1 + below(8);
    std::vector<row_block> blocks(1 + below(20));
    double all = 0;
    double slack = 0; // the largest row
    for (auto& x : blocks) {
      x = {static_cast<int64_t>(below(100)), 4 * (1 + below(300))};
      auto row = static_cast<double>(x.row_bytes);
      all += row * static_cast<double>(x.rows);
      slack = std::max(slack, row);
    }
    auto begins = cut_rows(blocks, ranks);
    REQUIRE(begins.size() == blocks.size());
    std::vector<double> shares(ranks);
    for (size_t i = 0; i < blocks.size(); ++i) {
      REQUIRE(begins[i].size() == ranks + 1);
      CHECK(begins[i].front() == 0);
      CHECK(begins[i].back() == blocks[i].rows);
      CHECK(std::is_sorted(begins[i].begin(), begins[i].end()));
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        auto rows = begins[i][rank + 1] - begins[i][rank];
        shares[rank] += static_cast<double>(rows)
                        * static_cast<double>(blocks[i].row_bytes);
      }
    }
    for (auto share : shares)
      CHECK(share <= all / static_cast<double>(ranks) + slack + 1e-6);
  }
}

TEST_CASE(
  "replicas that share the optimizer's state compute what one process "
  "does of the whole batch",
  "[runtime][shards]") {
  auto optimizer = GENERATE(as<std::string>{}, "sgd", "sgd of sparse gradients",
                            "adam", "adamw", "adagrad", "rmsprop");
  auto [pipeline, replicas] = GENERATE(std::pair{1u, 2u}, std::pair{2u, 2u},
                                       std::pair{1u, 3u});
  check({optimizer, pipeline, replicas});
}

TEST_CASE("so they do with modules that tensor-parallel ranks share",
          "[runtime][shards]") {
  auto optimizer = GENERATE(as<std::string>{}, "adamw", "adagrad");
  auto [pipeline, replicas] = GENERATE(std::pair{1u, 2u}, std::pair{1u, 4u},
                                       std::pair{2u, 4u});
  check({optimizer, pipeline, replicas, 2});
}

TEST_CASE("each replica has its share of a large model's optimizer state",
          "[runtime][shards]") {
  auto replicas = GENERATE(2u, 4u);
  // More than travels at a time: 8 million parameters.
  job x{"sgd", 1, replicas, 1, 1 << 20, 2};
  auto mine = train_sharded(x);
  auto [least, most] = std::ranges::minmax(mine.updated);
  uint64_t all = 0;
  for (auto y : mine.updated)
    all += y;
  auto numbers = (width + 2) * x.inner + 1 + words * width + 12 + 1;
  CHECK(all == 4 * static_cast<uint64_t>(numbers));
  CHECK(static_cast<double>(most)
        <= 1.05 * static_cast<double>(all) / replicas);
  CHECK(least > 0);
  check_near(mine.parameters[0].back(), train_alone(x).back(), {.least = 1e-6});
}

namespace {

/// Nearly all of it is one table, of which each rank has some channels.
struct shared_table_impl : torch::nn::Module {
  shared_table_impl() {
    register_module("table", table);
    register_module("up", up);
  }

  Tensor forward(Tensor x) {
    return up(table(x).mean(1)).square().mean();
  }

  submodule<torch::nn::Embedding> table{4096, 32};
  submodule<torch::nn::Linear> up{32, 64};
};
TORCH_MODULE_IMPL(shared_table, shared_table_impl);

} // namespace

TEST_CASE("each replica has its share of what tensor-parallel ranks share",
          "[runtime][shards]") {
  auto replicas = GENERATE(4u, 6u); // with two slices of each
  CAPTURE(replicas);
  std::vector<uint64_t> updated(replicas);
  virtual_world_options world;
  world.config = config_of({.replicas = replicas, .tensor = 2});
  run_virtual_world(replicas, world, [&](session& s) {
    distributed_model model{seeded([] { return shared_table{}; })};
    set_tensor_parallelism(*model->table);
    set_tensor_parallelism(*model->up);
    torch::optim::SGD inner{model->parameters(), 0.1};
    distributed_optimizer optimizer{inner};
    model.partition();
    updated.at(s.rank()) = bytes_of(inner);
  });
  uint64_t all = 0;
  for (auto x : updated)
    all += x;
  CHECK(all == uint64_t{4} * (4096 * 32 + 32 * 64 + 64));
  CHECK(static_cast<double>(std::ranges::max(updated))
        <= 1.05 * static_cast<double>(all) / replicas);
}

TEST_CASE("an optimizer that looks at all parameters together is refused",
          "[runtime][shards]") {
  virtual_world_options world;
  world.config = config_of({});
  std::string said;
  try {
    run_virtual_world(2, world, [&](session&) {
      distributed_model model{seeded([] {
        return distributed_mixture{false, 8};
      })};
      torch::optim::LBFGS inner{model->parameters()};
      distributed_optimizer optimizer{inner};
      auto train_step = training_step(model);
      train_step(data_of(1, 0));
    });
  } catch (const error& e) {
    said = e.what();
  }
  CHECK_THAT(said, Catch::Matchers::ContainsSubstring("LBFGS"));
}

TEST_CASE("nobody waits for an update that cannot be sent",
          "[runtime][shards]") {
  virtual_world_options world;
  world.config = config_of({});
  run_virtual_world(2, world, [](session&) {
    distributed_model model{seeded([] {
      return function([](function_impl&, Tensor x) { return x; },
                      torch::ones({4}));
    })};
    model.partition();
    torch::optim::SGD sgd{model->parameters(), 0.1};
    optimizer_shards shards{current_rank()};
    shards.cut(sgd, model.state().map());
    auto weight = model->weight;
    weight.set_requires_grad(false);
    weight.set_data(torch::zeros({4}, at::ScalarType::UInt16));
    auto told = error_of([&] { shards.end_update(); }, error_code::unsupported);
    if (told.find("no tensors of type UInt16") == told.npos)
      throw std::runtime_error{told};
    shards.await_updates();
  });
}
