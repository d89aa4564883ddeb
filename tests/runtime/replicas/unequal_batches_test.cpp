#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <functional>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

// Ranks that share modules and are given batches of different sizes: an error
// that says where, before any of them calls a shared module.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using tensors = std::vector<Tensor>;

struct shared_net_impl : torch::nn::Module {
  shared_net_impl() {
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    return fc(x);
  }

  submodule<torch::nn::Linear> fc{8, 8};
};
TORCH_MODULE_IMPL(shared_net, shared_net_impl);

/// Gives its shared module the rows that are positive.
struct choosing_net_impl : torch::nn::Module {
  choosing_net_impl() {
    register_module("expert", expert);
  }

  Tensor forward(Tensor x) {
    return expert(x.index({x.select(1, 0) > 0})).sum() + x;
  }

  submodule<torch::nn::Linear> expert{8, 8};
};
TORCH_MODULE_IMPL(choosing_net, choosing_net_impl);

/// Cuts a parameter itself, and exchanges what has one size on all ranks.
struct cut_part_impl : torch::nn::Module {
  cut_part_impl() {
    smp::nn::parameter_creation_scope cut{*this};
    weight = register_parameter("weight", torch::ones({8}));
  }

  Tensor forward(Tensor x) {
    return x * smp::nn::fwd_allreduce_for_tp(weight.sum());
  }

  Tensor weight;
};
TORCH_MODULE_IMPL(cut_part, cut_part_impl);

struct cut_net_impl : torch::nn::Module {
  cut_net_impl() {
    register_module("part", part);
  }

  Tensor forward(Tensor x) {
    return part(x);
  }

  submodule<cut_part> part;
};
TORCH_MODULE_IMPL(cut_net, cut_net_impl);

/// @param of what each rank is given
/// @returns what a step fails with on each; the next one does not
template <class Net>
std::vector<std::string> failures(const std::function<tensors(uint64_t)>& of,
                                  uint64_t pipeline = 1) {
  std::vector<std::string> result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.pipeline_parallel_degree = pipeline;
  world.config.tensor_parallel_modules = {"*"};
  if constexpr (std::is_same_v<Net, cut_net>)
    world.config.tensor_parallel_modules.clear();
  world.config.ddp = true;
  world.config.microbatches = 2;
  world.config.threads = 1;
  world.reorder = true;
  run_virtual_world(2 * pipeline, world, [&](session&) {
    distributed_model model{seeded([] { return Net{}; })};
    auto train_step = step([&](const tensors& xs) {
      auto loss = model(xs[0]).square().mean();
      model.backward(loss);
      return loss;
    });
    auto why = error_of([&] { train_step(of(tp_rank())); });
    train_step(tensors{torch::ones({4, 8})});
    std::unique_lock guard{mutex};
    result.push_back(why);
  });
  return result;
}

Tensor rows(int64_t n) {
  return torch::ones({n, 8});
}

} // namespace

TEST_CASE("peers with batches of other sizes hear which tensor is meant",
          "[runtime][tensor_parallel][R62]") {
  uint64_t pipeline = GENERATE(1, 2);
  auto labels = [](uint64_t rank) {
    return tensors{rows(4), torch::ones({4}, torch::kLong),
                   torch::ones({rank == 0 ? 6 : 2, 3, 1}, torch::kDouble)};
  };
  auto all = failures<shared_net>(labels, pipeline);
  REQUIRE(all.size() == 2 * pipeline);
  for (auto& why : all)
    CHECK_THAT(why, ContainsSubstring("ranks that share modules need batches "
                                      "of the same sizes, but a microbatch has "
                                      "as tensor 2 float64[3, 3, 1] on rank 0 "
                                      "and float64[1, 3, 1] on rank 1"));
}

TEST_CASE("peers hear of other types and numbers of tensors",
          "[runtime][tensor_parallel][R62]") {
  for (auto& why : failures<shared_net>([](uint64_t rank) {
         return tensors{rows(4).to(rank == 0 ? torch::kFloat : torch::kHalf)};
       }))
    CHECK_THAT(why, ContainsSubstring("tensor 0 float32[2, 8] on rank 0 and "
                                      "float16[2, 8] on rank 1"));
  for (auto& why : failures<shared_net>([](uint64_t rank) {
         return rank == 0 ? tensors{rows(4)} : tensors{rows(4), rows(2)};
       }))
    CHECK_THAT(why, ContainsSubstring("has 1 tensor on rank 0 and 2 on rank "
                                      "1"));
}

TEST_CASE("what differs beyond the room for sizes is seen, too",
          "[runtime][tensor_parallel][R62]") {
  for (auto& why : failures<shared_net>([](uint64_t rank) {
         tensors result(20);
         for (auto& x : result)
           x = rows(4);
         result.back() = rows(rank == 0 ? 4 : 2);
         return result;
       }))
    CHECK_THAT(why, ContainsSubstring("has tensors of other sizes on rank 0 "
                                      "than on rank 1"));
}

TEST_CASE("peers that only exchange by their own code have batches of any size",
          "[runtime][tensor_parallel][R62]") {
  for (auto& why : failures<cut_net>(
         [](uint64_t rank) { return tensors{rows(rank == 0 ? 4 : 2)}; }))
    CHECK(why == "no error");
}

TEST_CASE(
  "peers that choose other numbers of rows hear of the module that got "
  "them, and what to do",
  "[runtime][tensor_parallel]") {
  auto chosen = [](uint64_t rank) {
    auto x = rows(4); // two in each microbatch
    if (rank == 1)
      x.select(1, 0).fill_(-1)[3] = 1;
    return tensors{x};
  };
  for (auto& why : failures<choosing_net>(chosen)) {
    CHECK_THAT(why, ContainsSubstring(" in expert; ranks that share a module "
                                      "have to call it with as many rows each")
                      && ContainsSubstring("tensor_parallel.modules"));
    CHECK_THAT(why, ContainsSubstring("[2, 4]"));
  }
}
