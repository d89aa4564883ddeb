#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <cmath>
#include <string>
#include <vector>

// Parameters that a module of a user makes in scopes, so that each rank keeps a
// slice of them, against the same computed with whole ones.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 4;
constexpr int64_t inner_width = 6;
constexpr int64_t rows = 8;
constexpr double most = 0.05; // norm of gradients

/// Two linears, the first of which is cut over outputs, the second over inputs:
/// with samples of its own, or those of all, as Megatron has them.
struct halves_impl : torch::nn::Module {
  explicit halves_impl(bool same_samples) : same(same_samples) {
    smp::nn::parameter_creation_options how{.scaled_batch = !same};
    {
      smp::nn::initialize_with_output_partition cut{*this, how};
      up = register_parameter("up", torch::randn({inner_width, width}));
      offset = register_parameter("offset", torch::randn({inner_width}));
    }
    smp::nn::initialize_with_input_partition cut{*this, how};
    down = register_parameter("down", torch::randn({width, inner_width}));
    bias = register_parameter("bias", torch::randn({width}));
  }

  /// x: [N, width] @returns the same
  Tensor forward(Tensor x) {
    auto all = same ? smp::nn::bwd_allreduce_for_tp(x)
                    : smp::nn::fused_allgather_for_tp(x, 0);
    auto part = (all.matmul(up.t()) + offset).tanh().matmul(down.t());
    return bias
           + (same ? smp::nn::fwd_allreduce_for_tp(part)
                   : smp::nn::reduce_scatter_for_tp(part, 0));
  }

  bool same;
  Tensor up, offset, down, bias;
};
TORCH_MODULE_IMPL(halves, halves_impl);

struct halves_net_impl : torch::nn::Module {
  explicit halves_net_impl(bool same_samples) : part(same_samples) {
    gain = register_parameter("gain", torch::randn({width}));
    register_module("part", part);
  }

  Tensor forward(Tensor x) {
    return part(x * gain).square().mean();
  }

  submodule<halves> part;
  Tensor gain;
};
TORCH_MODULE_IMPL(halves_net, halves_net_impl);

/// What all of it is in one process, without smp.
struct alone {
  alone() {
    values = seeded([] {
      return numbers{{"part.up", torch::randn({inner_width, width})},
                     {"part.offset", torch::randn({inner_width})},
                     {"part.down", torch::randn({width, inner_width})},
                     {"part.bias", torch::randn({width})},
                     {"gain", torch::randn({width})}};
    });
  }

  /// @returns the norm of the gradients
  double train(const Tensor& x) {
    numbers ps;
    for (auto& [name, t] : values)
      ps[name] = t.clone().requires_grad_();
    auto h = (x * ps["gain"]).matmul(ps["part.up"].t()) + ps["part.offset"];
    auto y = h.tanh().matmul(ps["part.down"].t()) + ps["part.bias"];
    y.square().mean().backward();
    double squares = 0;
    for (auto& [name, t] : ps) {
      gradients[name] = t.grad();
      squares += t.grad().square().sum().item<double>();
    }
    return std::sqrt(squares);
  }

  numbers values, gradients;
};

numbers as_numbers(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

numbers times(const numbers& xs, double factor) {
  numbers result;
  for (auto& [name, t] : xs)
    result[name] = t * factor;
  return result;
}

virtual_world_options two_sharing(bool prescaled) {
  virtual_world_options result;
  result.config.tensor_parallel_degree = 2;
  result.config.prescaled_batch = prescaled;
  result.config.ddp = true;
  result.config.threads = 1;
  result.reorder = true;
  return result;
}

/// D: a slice, S: its gradient is one of several batches.
std::string kind_of(const Tensor& x) {
  std::string result = smp::nn::is_distributed_parameter(x) ? "D" : "";
  return result + (smp::nn::is_scaled_batch_parameter(x) ? "S" : "");
}

} // namespace

TEST_CASE("parameters cut over inputs and outputs train as whole ones do",
          "[runtime][tensor_parallel][R58]") {
  auto prescaled = GENERATE(false, true);
  CAPTURE(prescaled);
  auto data = torch::linspace(-1, 1, rows * width).view({rows, width}).sin();
  alone expected;
  auto norm = expected.train(data);
  REQUIRE(norm > 2 * most); // so that gradients are clipped
  run_virtual_world(2, two_sharing(prescaled), [&](session&) {
    auto made = seeded([&] { return halves_net{prescaled}; });
    distributed_model model{made};
    auto train_step = training_step(model);
    train_step(data.chunk(static_cast<int64_t>(data_size())).at(data_rank()));
    auto gradients = as_numbers(model.gradients());
    auto found = clip_grad_norm_(model, most);
    auto clipped = as_numbers(model.gradients());
    auto state = as_numbers(model.state_dict());
    named_tensors others;
    for (auto& [name, t] : expected.values)
      others.emplace_back(name, t * 2 + 1);
    model.load_state_dict(others);
    auto loaded = as_numbers(model.state_dict());
    assertion_lock held;
    check_near(state, expected.values);
    check_near(gradients, expected.gradients);
    CHECK(found == Catch::Approx(norm).epsilon(1e-5));
    check_near(clipped, times(expected.gradients, most / norm),
               {.share = 1e-4});
    check_near(loaded, as_numbers(others));
    auto& part = *made->part;
    CHECK(part.up.size(0) == inner_width / 2);
    CHECK(part.down.size(1) == inner_width / 2);
    const std::string slice = prescaled ? "D" : "DS";
    for (auto& x : {part.up, part.offset, part.down})
      CHECK(kind_of(x) == slice);
    CHECK(kind_of(part.bias).empty());
  });
}

namespace {

constexpr int64_t high = 64; // enough numbers to be deferred

struct drawn_impl : torch::nn::Module {
  drawn_impl() {
    smp::nn::parameter_creation_scope cut{
      *this,
      1,
      {.dtype = torch::kDouble, .use_normal = true, .initializer_range = 0.5}};
    weight = register_parameter("weight", torch::zeros({high, high}));
    places = register_parameter("places", torch::arange(high).view({1, high}),
                                false);
  }

  Tensor forward(Tensor x) {
    return x * smp::nn::fwd_allreduce_for_tp(weight.sum());
  }

  Tensor weight, places;
};
TORCH_MODULE_IMPL(drawn, drawn_impl);

struct drawn_net_impl : torch::nn::Module {
  drawn_net_impl() {
    register_module("part", part);
  }

  Tensor forward(Tensor x) {
    return part(x);
  }

  submodule<drawn> part;
};
TORCH_MODULE_IMPL(drawn_net, drawn_net_impl);

} // namespace

TEST_CASE("a scope gives parameters a type and normal values, now or later",
          "[runtime][tensor_parallel]") {
  auto deferred = GENERATE(false, true);
  CAPTURE(deferred);
  auto expected = seeded([] {
    return torch::empty({high, high}, torch::kDouble).normal_(0, 0.5);
  });
  run_virtual_world(2, two_sharing(false), [&](session&) {
    auto made = seeded([&] {
      delay_param_initialization deferring{deferred};
      return drawn_net{};
    });
    distributed_model model{made};
    model.partition();
    auto state = as_numbers(model.state_dict());
    assertion_lock held;
    CHECK(made->part->weight.sizes() == torch::IntArrayRef{high, high / 2});
    CHECK(made->part->weight.requires_grad());
    CHECK(state.at("part.weight").scalar_type() == torch::kDouble);
    CHECK(torch::equal(state.at("part.weight"), expected));
    CHECK(torch::equal(state.at("part.places"),
                       torch::arange(high).view({1, high})));
  });
}

TEST_CASE("a scope refuses types of integers and a deviation below 0",
          "[runtime][tensor_parallel]") {
  std::vector<std::string> told;
  run_virtual_world(1, {}, [&](session&) {
    torch::nn::Module x;
    using scope = smp::nn::parameter_creation_scope;
    told = {error_of([&] {
              scope cut{x, 0, {.dtype = torch::kLong}};
            }),
            error_of([&] {
              scope cut{x, 0, {.initializer_range = -1}};
            })};
  });
  CHECK_THAT(told.at(0),
             ContainsSubstring("dtype is not a floating-point type"));
  CHECK_THAT(told.at(1), ContainsSubstring("allowed: 0 or more"));
}
