#include "tests/support/catch.hpp"

#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <string>
#include <vector>

// What the partition print says of modules that were to be shared by
// tensor-parallel ranks and are not, and how it would have to be.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

namespace nn = torch::nn;

/// Cuts its weight itself, and has no distributed implementation.
struct own_cut_impl : nn::Module {
  own_cut_impl() {
    smp::nn::parameter_creation_scope cut{*this};
    weight = register_parameter("weight", torch::ones({4, 4}));
  }

  Tensor forward(Tensor x) {
    return x * weight.sum();
  }

  Tensor weight;
};
TORCH_MODULE_IMPL(own_cut, own_cut_impl);

/// Has a parameter of its own, and a Linear.
struct scaled_linear_impl : nn::Module {
  scaled_linear_impl() {
    scale = register_parameter("scale", torch::ones({4}));
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    return fc(x) * scale;
  }

  Tensor scale;
  submodule<nn::Linear> fc{4, 4};
};
TORCH_MODULE_IMPL(scaled_linear, scaled_linear_impl);

struct net_impl : nn::Module {
  net_impl() {
    register_module("features", features);
    register_module("drop", drop);
    register_module("scaled", scaled);
    register_module("cut", cut);
    register_module("odd", odd);
    register_module("norm", norm);
  }

  Tensor forward(Tensor x) {
    return x;
  }

  nn::Sequential features{nn::Conv2d(3, 4, 3), nn::Dropout(0.1),
                          nn::BatchNorm2d(4), nn::Conv2d(4, 4, 3)};
  submodule<nn::Dropout> drop{0.1};
  submodule<scaled_linear> scaled;
  submodule<own_cut> cut;
  submodule<nn::Linear> odd{5, 5};
  submodule<nn::LayerNorm> norm{nn::LayerNormOptions({4})};
};
TORCH_MODULE_IMPL(net, net_impl);

/// What was wrapped stands in one line again.
std::string one_line_each(std::string x) {
  for (size_t at = 0; (at = x.find("\n  ", at)) != x.npos;)
    x.replace(at, x.find_first_not_of(' ', at + 1) - at, " ");
  return x;
}

/// @returns the partition print on two ranks that share
template <class F>
std::string text_of(const std::vector<std::string>& modules, F make,
                    bool all = false) {
  std::string result;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = modules;
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded(make)};
    model.partition();
    if (s.rank() == 0)
      result = model.partition_text(false, all);
  });
  return one_line_each(result);
}

std::string text_of(const std::vector<std::string>& modules) {
  return text_of(modules, [] { return net{}; });
}

std::string text_of_convolution(const std::vector<std::string>& modules) {
  return text_of(modules, [] { return nn::Sequential{nn::Conv2d(3, 4, 3)}; });
}

} // namespace

TEST_CASE("what has no distributed implementation is said of what is named",
          "[runtime][tensor_parallel]") {
  auto text = text_of({"features"});
  CHECK_THAT(text,
             ContainsSubstring("\nConv2d not shared, as there is no "
                               "distributed implementation of it; "
                               "smp::tp_register gives it one: features.0, "
                               "features.3\n")
               && ContainsSubstring("\nBatchNorm2d not shared, as there is no "
                                    "distributed implementation")
               && !ContainsSubstring("Dropout not shared"));
}

TEST_CASE("a program may ask for all that could be shared",
          "[runtime][tensor_parallel]") {
  auto make = [] { return net{}; };
  CHECK_THAT(text_of({"odd"}, make, true),
             ContainsSubstring("\nLinear not shared, as it is not named; name "
                               "it in tensor_parallel.modules: scaled.fc\n"));
  CHECK_THAT(text_of({"odd"}, make), !ContainsSubstring("it is not named"));
}

TEST_CASE("a name that fits nothing with parameters is told to be left out",
          "[runtime][tensor_parallel]") {
  CHECK_THAT(text_of({"drop"}),
             ContainsSubstring("\nDropout not shared, as it has no parameters "
                               "of which each could hold a part; do not name "
                               "it: drop\n"));
}

TEST_CASE(
  "no word is said of a class whose parts are shared, or that cuts "
  "parameters by itself",
  "[runtime][tensor_parallel]") {
  auto text = text_of({"scaled", "cut", "odd", "norm"});
  CHECK_THAT(text, ContainsSubstring("\nLinear shared by 2 ranks: scaled.fc\n")
                     && ContainsSubstring("LayerNorm shared by 2 ranks: norm\n")
                     && ContainsSubstring("cut along axis 0 by 2 ranks: "
                                          "cut.weight\n"));
  CHECK_THAT(text, !ContainsSubstring("no distributed implementation"));
  CHECK_THAT(text, ContainsSubstring("\nLinear not shared, as its 5 input "
                                     "channels cannot be divided among 2 "
                                     "ranks; 4 or 6 could: odd\n"));
  CHECK_THAT(text, !ContainsSubstring("warning: nothing is shared"));
}

TEST_CASE("ranks that share nothing are warned of it",
          "[runtime][tensor_parallel]") {
  // Where code cuts something, that is shared.
  CHECK_THAT(text_of({"odd"}), !ContainsSubstring("nothing is shared"));
  CHECK_THAT(text_of_convolution({"0"}),
             ContainsSubstring("warning: nothing is shared, so the 2 ranks of "
                               "each tensor-parallel group train as replicas, "
                               "each with a whole model; the reasons are "
                               "below\n")
               && ContainsSubstring("Conv2d not shared"));
  CHECK_THAT(text_of_convolution({}),
             ContainsSubstring("; name modules in tensor_parallel.modules, or "
                               "leave smp.tensor_parallel_degree out\n"));
}
