#include "tests/support/catch.hpp"

#include "tests/support/torch_two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// Optimizers that cannot update the model (R60), and replicas that leave.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using optimizer_ptr = std::unique_ptr<torch::optim::Optimizer>;

struct grid {
  uint64_t pipeline = 1;
  uint64_t replicas = 1;
  bool shards = false;
  uint64_t tensor = 1;
};

session_config config_of(const grid& x) {
  session_config result;
  result.pipeline_parallel_degree = x.pipeline;
  result.tensor_parallel_degree = x.tensor;
  result.ddp = x.replicas > 1;
  result.shard_optimizer_state = x.shards;
  result.auto_partition = false;
  result.threads = 1;
  return result;
}

struct checked_net_impl : torch::nn::Module {
  checked_net_impl() {
    register_module("first", first);
    {
      partition_scope on_last{1};
      second = submodule<torch::nn::Linear>(3, 3);
    }
    register_module("second", second);
    register_buffer("mask", mask);
  }

  Tensor forward(Tensor x) {
    return second(first(x)) * mask;
  }

  torch::nn::Linear first{3, 3};
  submodule<torch::nn::Linear> second = nullptr;
  Tensor mask = torch::ones({3});
};
TORCH_MODULE_IMPL(checked_net, checked_net_impl);

using maker = std::function<optimizer_ptr(checked_net_impl&, uint64_t rank)>;

/// @returns by rank, what the first two steps of a wrong optimizer say, and
/// then one without it: nothing
std::vector<std::string> errors_of(const grid& x, const maker& make) {
  auto ranks = x.pipeline * x.replicas;
  std::vector<std::string> result(3 * ranks);
  virtual_world_options world;
  world.config = config_of(x);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return checked_net{}; })};
    if (x.pipeline == 1)
      model->second->smp_hook.pinned = 0;
    auto train_step = step([&](Tensor y) {
      auto loss = model(y).sum();
      model.backward(loss);
      return loss;
    });
    auto attempt = [&](size_t i) {
      try {
        train_step(torch::ones({2, 3}));
      } catch (const error& e) {
        result[i * ranks + s.rank()] = e.what();
      }
    };
    {
      auto inner = make(*model, s.rank());
      distributed_optimizer optimizer{*inner};
      attempt(0);
      attempt(1);
    }
    attempt(2);
  });
  return result;
}

/// All ranks say the same, as long as the optimizer is there.
void check_told(const grid& x, const maker& make,
                const std::vector<std::string>& texts) {
  CAPTURE(x.pipeline, x.replicas, x.shards);
  auto told = errors_of(x, make);
  auto ranks = told.size() / 3;
  for (size_t i = 0; i < told.size(); ++i) {
    if (i >= 2 * ranks) {
      CHECK(told[i].empty());
      continue;
    }
    CHECK(told[i] == told[0]);
    for (auto& text : texts)
      CHECK_THAT(told[i], ContainsSubstring(text));
  }
}

optimizer_ptr sgd(std::vector<Tensor> xs, double lr = 0.1) {
  return std::make_unique<torch::optim::SGD>(std::move(xs), lr);
}

} // namespace

TEST_CASE("an optimizer over what is no parameter of the model is refused",
          "[runtime][optimizer][R60]") {
  auto x = GENERATE(grid{}, grid{2, 1}, grid{1, 2}, grid{2, 2, true});
  check_told(
    x,
    [](auto& model, uint64_t) {
      auto all = model.parameters();
      all.push_back(torch::zeros({5, 7}, torch::requires_grad()));
      return sgd(all);
    },
    {"group 0", "no parameter of the distributed model", "Float [5, 7]"});
  check_told(x,
             [](auto&, uint64_t) {
               // Of another model that is the same.
               return sgd(checked_net {} -> parameters());
             },
             {"no parameter of the distributed model", "number 0"});
  auto alone = grid{1, x.replicas};
  check_told(alone, [](auto& model, uint64_t) { return sgd({model.mask}); },
             {"no parameter of the distributed model", "its buffer 'mask'"});
}

TEST_CASE("replicas whose optimizers differ are told how",
          "[runtime][optimizer][R60]") {
  auto x = GENERATE(grid{1, 2}, grid{1, 2, true}, grid{2, 2, true});
  auto last = x.pipeline * x.replicas - 1;
  auto other = "rank " + std::to_string(last);
  auto first = "than on rank " + std::to_string(x.pipeline - 1);
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto all = model.parameters();
               if (rank == last)
                 std::swap(all[2], all[3]);
               return sgd(all);
             },
             {other, first, "group 0 has 'second.bias' as number ",
              "and not 'second.weight'"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto all = model.parameters();
               if (rank == last)
                 all.pop_back();
               return sgd(all);
             },
             {other, first, "has nothing as number ", "and not 'second.bias'"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               return sgd(model.parameters(), rank == last ? 0.2 : 0.1);
             },
             {other, first, "group 0 has lr = 0.2, and not 0.1"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto result = sgd(model.parameters());
               if (rank == last)
                 result->add_param_group({std::vector<Tensor>{}});
               return result;
             },
             {other, first, "it has 2 groups, and not 1"});
}

TEST_CASE(
  "an optimizer over a part of the model, and several of them, are fine",
  "[runtime][optimizer][R60]") {
  grid x{2, 2, true};
  auto told = errors_of(
    x, [](auto& model, uint64_t) { return sgd(model.second->parameters()); });
  for (auto& text : told)
    CHECK(text.empty());
}

TEST_CASE("a replica that leaves before the others is named, and the way out",
          "[runtime][replicas]") {
  auto x = GENERATE(grid{1, 2}, grid{1, 3}, grid{2, 2, true},
                    grid{1, 2, false, 2});
  CAPTURE(x.pipeline, x.replicas, x.tensor);
  auto of_replica = x.pipeline * x.tensor;
  auto ranks = of_replica * x.replicas;
  std::vector<std::string> told(ranks);
  virtual_world_options world;
  world.config = config_of(x);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return checked_net{}; })};
    if (x.pipeline == 1)
      model->second->smp_hook.pinned = 0;
    auto train_step = step([&](Tensor y) {
      auto loss = model(y).sum();
      model.backward(loss);
      return loss;
    });
    // The last replica has fewer batches.
    auto n = rdp_rank() + 1 == x.replicas ? 2 : 4;
    for (int i = 0; i < n; ++i)
      try {
        train_step(torch::ones({2, 3}));
      } catch (const error& e) {
        if (e.code() == error_code::config && i >= 2)
          told[s.rank()] = e.what();
      }
  });
  for (size_t i = 0; i < ranks; ++i) {
    INFO("rank " << i);
    if (i / of_replica + 1 == x.replicas) {
      CHECK(told[i].empty());
      continue;
    }
    auto of_last = [&](uint64_t stage) {
      auto who = ranks - of_replica + stage;
      return ContainsSubstring("rank " + std::to_string(who)
                               + ": left the run");
    };
    CHECK_THAT(told[i], of_last(0) || of_last(x.pipeline - 1));
    CHECK_THAT(
      told[i],
      ContainsSubstring(x.tensor > 1
                          ? "with skip(), all ranks that share modules together"
                          : "with skip() ("));
  }
}
