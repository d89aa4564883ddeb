#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Shared classes without hooks that take and return tensors in any form: as a
// submodule and in a Sequential, on the rank that calls them and on another.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 8;

using list = std::vector<Tensor>;
using couple = std::pair<Tensor, Tensor>;
using triple = std::tuple<Tensor, Tensor, Tensor>;
using nest = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;

Tensor& first_of(list& x) {
  return x.at(0);
}

Tensor& first_of(couple& x) {
  return x.first;
}

template <class... Ts>
Tensor& first_of(std::tuple<Ts...>& x) {
  return std::get<0>(x);
}

void fill(list& x, const Tensor& h) {
  x = {h, h * 2, h * 3};
}

void fill(couple& x, const Tensor& h) {
  x = {h, h * 2};
}

void fill(triple& x, const Tensor& h) {
  x = {h, h * 2, h * 3};
}

void fill(nest& x, const Tensor& h) {
  x = {h, std::tuple{h * 2, h * 3}};
}

/// A number that tells which tensor is where.
Tensor number_of(const Tensor& x) {
  return x.sin().mean();
}

Tensor number_of(const list& xs) {
  auto result = torch::zeros({});
  for (auto& x : xs)
    result = result * 2 + number_of(x);
  return result;
}

Tensor number_of(const couple& x) {
  return number_of(list{x.first, x.second});
}

template <class... Ts>
Tensor number_of(const std::tuple<Ts...>& xs) {
  auto result = torch::zeros({});
  std::apply([&](auto&... ys) { ((result = result * 2 + number_of(ys)), ...); },
             xs);
  return result;
}

/// The feed-forward half of a layer.
struct half_of_layer : torch::nn::Module {
  half_of_layer() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }

  Tensor of(const Tensor& h) {
    return h + down(torch::relu(up(norm(h))));
  }

  torch::nn::LayerNorm norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  torch::nn::Linear up{width, 12};
  torch::nn::Linear down{12, width};
};

/// Takes a vector, and returns hidden states.
struct gathers_impl : half_of_layer {
  using form = list;

  Tensor forward(list xs) {
    return of(xs.at(0));
  }
};
TORCH_MODULE_IMPL(gathers, gathers_impl);

/// Returns all that it takes.
template <class F>
struct passes : half_of_layer {
  using form = F;

  F forward(F xs) {
    first_of(xs) = of(first_of(xs));
    return xs;
  }
};

struct list_block_impl : passes<list> {};
struct couple_block_impl : passes<couple> {};
struct triple_block_impl : passes<triple> {};
struct nest_block_impl : passes<nest> {};
TORCH_MODULE_IMPL(list_block, list_block_impl);
TORCH_MODULE_IMPL(couple_block, couple_block_impl);
TORCH_MODULE_IMPL(triple_block, triple_block_impl);
TORCH_MODULE_IMPL(nest_block, nest_block_impl);

transformer_layer_options half_of(bool returns_all) {
  transformer_layer_options x;
  x.returns_arguments = returns_all;
  x.activation = [](const Tensor& y) { return torch::relu(y); };
  x.output_norm = {"norm"};
  x.intermediate = {"up"};
  x.output = {"down"};
  return x;
}

template <class Impl>
bool registered(bool returns_all) {
  return tp_register<Impl, smp::nn::distributed_transformer_layer>(
    [returns_all](const Impl&) { return half_of(returns_all); });
}

[[maybe_unused]] const bool forms_are_registered
  = registered<gathers_impl>(false) && registered<list_block_impl>(true)
    && registered<couple_block_impl>(true)
    && registered<triple_block_impl>(true) && registered<nest_block_impl>(true);

/// @tparam Next follows a Block in the Sequential
template <class Block, class Next>
struct forms_impl : torch::nn::Module {
  using form = typename Block::ContainedType::form;

  forms_impl() : chain(Block(), Next()) {
    register_module("in", in);
    register_module("block", block);
    register_module("chain", chain);
  }

  Tensor forward(Tensor x) {
    form given;
    fill(given, in(x));
    auto once = block(given);
    if constexpr (std::is_same_v<decltype(once), form>)
      return number_of(chain->forward<form>(std::move(once)));
    else
      return number_of(chain->forward(list{once, once * 2}));
  }

  torch::nn::Linear in{width, width};
  submodule<Block> block;
  torch::nn::Sequential chain;
};

/// Follows what returns one tensor.
struct last_impl : torch::nn::LinearImpl {
  last_impl() : LinearImpl(width, width) {
    // nop
  }
};
TORCH_MODULE_IMPL(last, last_impl);

[[maybe_unused]] const bool last_is_registered = tp_register<last_impl>(
  "Linear");

struct outcome {
  std::map<std::string, Tensor> gradients;
  double loss = 0;
  std::string text;
};

template <class Model>
outcome train_forms(uint64_t pipeline, const Tensor& data) {
  outcome result;
  std::mutex mutex;
  virtual_world_options world;
  world.reorder = true;
  world.config.tensor_parallel_degree = 2;
  world.config.pipeline_parallel_degree = pipeline;
  world.config.tensor_parallel_modules = {"*"};
  world.config.ddp = true;
  world.config.microbatches = 2;
  world.config.threads = 1;
  run_virtual_world(2 * pipeline, world, [&](session& s) {
    distributed_model model{
      seeded([] { return torch::nn::ModuleHolder<Model>{}; })};
    auto there = static_cast<uint32_t>(pipeline - 1);
    set_partition(*model->block, there);
    set_partition(*model->chain, there);
    auto train_step = training_step(model);
    auto loss = train_step(data.chunk(2).at(data_rank())).reduce_mean();
    loss = allreduce(loss, comm_group::dp, reduce_op::mean);
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() != 0)
      return;
    result.gradients = {gradients.begin(), gradients.end()};
    result.loss = loss.template item<double>();
    result.text = model.partition_text();
  });
  return result;
}

/// Shared by two ranks, on the rank that calls and on another, against one
/// process.
template <class Block, class Next = Block>
void compare() {
  using model_impl = forms_impl<Block, Next>;
  auto pipeline = GENERATE(uint64_t{1}, uint64_t{2});
  CAPTURE(pipeline);
  torch::manual_seed(3);
  auto data = torch::randn({8, 3, width});
  auto x = train_forms<model_impl>(pipeline, data);
  CHECK_THAT(x.text,
             ContainsSubstring("TransformerLayer shared by 2 ranks for ")
               && ContainsSubstring(": block, chain.0"));
  auto model = seeded([] { return torch::nn::ModuleHolder<model_impl>{}; });
  double loss = 0;
  auto parts = data.chunk(4);
  for (auto& part : parts) {
    auto y = model->forward(part) / static_cast<double>(parts.size());
    y.backward();
    loss += y.template item<double>();
  }
  CHECK(std::abs(loss - x.loss) <= 1e-5 * std::abs(loss) + 1e-7);
  for (auto& p : model->named_parameters()) {
    INFO(p.key());
    REQUIRE(x.gradients.contains(p.key()));
    check_near(x.gradients.at(p.key()), p.value().grad());
  }
}

} // namespace

TEST_CASE("a shared class that takes a vector may return one tensor",
          "[runtime][tensor_parallel][tp_register]") {
  compare<gathers, last>();
}

TEST_CASE("a shared class returns tensors in the form in which it takes them",
          "[runtime][tensor_parallel][tp_register]") {
  SECTION("a vector") {
    compare<list_block>();
  }
  SECTION("a pair") {
    compare<couple_block>();
  }
  SECTION("a tuple") {
    compare<triple_block>();
  }
  SECTION("a tuple in a tuple") {
    compare<nest_block>();
  }
}
