#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <mutex>
#include <string>
#include <vector>

// Which parameters a program is told to be slices, and gradients of how many
// batches theirs are.

using namespace smp;
using namespace smp::test;

namespace {

struct cut_part_impl : torch::nn::Module {
  cut_part_impl() {
    smp::nn::parameter_creation_scope scope{*this};
    scale = register_parameter("scale", torch::ones({4}));
  }

  Tensor forward(Tensor x) {
    return x * smp::nn::fwd_allreduce_for_tp(scale.sum());
  }

  Tensor scale;
};
TORCH_MODULE_IMPL(cut_part, cut_part_impl);

struct parts_impl : torch::nn::Module {
  parts_impl() {
    register_module("cut", cut);
    register_module("shared", shared);
    register_module("whole", whole);
  }

  Tensor forward(Tensor x) {
    return whole(shared(cut(x)));
  }

  submodule<cut_part> cut;
  submodule<torch::nn::Linear> shared{4, 4}, whole{4, 4};
};
TORCH_MODULE_IMPL(parts, parts_impl);

/// Of each parameter: D if it is distributed, and S if its gradient is one of
/// several batches.
std::string told_of(parts_impl& model) {
  std::string result;
  for (auto& p : model.named_parameters()) {
    result += result.empty() ? "" : " ";
    result += p.key() + "=";
    result += smp::nn::is_distributed_parameter(p.value()) ? "D" : "";
    result += smp::nn::is_scaled_batch_parameter(p.value()) ? "S" : "";
  }
  return result;
}

struct answers {
  std::vector<std::string> before, behind; // the partition, on each rank
};

answers ask(bool prescaled, uint64_t pipeline = 1) {
  answers result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.pipeline_parallel_degree = pipeline;
  world.config.tensor_parallel_modules = {"shared"};
  world.config.prescaled_batch = prescaled;
  world.config.auto_partition = false;
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2 * pipeline, world, [&](session& s) {
    auto made = seeded([] { return parts{}; });
    set_partition(*made->shared, static_cast<uint32_t>(pp_size() - 1));
    distributed_model model{made};
    auto before = told_of(*made);
    model.partition();
    auto behind = told_of(*made);
    if (smp::nn::is_distributed_parameter(torch::ones({4}))
        || smp::nn::is_distributed_parameter(Tensor{}))
      behind += " and what is none";
    std::unique_lock guard{mutex};
    result.before.push_back(before);
    if (s.pp_rank() == 0)
      result.behind.push_back(behind);
  });
  return result;
}

} // namespace

TEST_CASE("slices are told from whole parameters, and batches from batches",
          "[runtime][tensor_parallel]") {
  auto own = ask(false);
  const std::string nothing
    = "cut.scale= shared.weight= shared.bias= whole.weight= whole.bias=";
  CHECK(own.before == std::vector<std::string>(2, nothing));
  CHECK(
    own.behind
    == std::vector<std::string>(2,
                                "cut.scale=DS shared.weight=DS shared.bias=DS "
                                "whole.weight= whole.bias="));
}

TEST_CASE("with the same samples the slices of smp's modules have one batch",
          "[runtime][tensor_parallel][R58]") {
  CHECK(
    ask(true).behind
    == std::vector<std::string>(2,
                                "cut.scale=DS shared.weight=D shared.bias=D "
                                "whole.weight= whole.bias="));
}

TEST_CASE("nothing is told of parameters of other ranks of a pipeline",
          "[runtime][tensor_parallel]") {
  CHECK(ask(false, 2).behind
        == std::vector<std::string>(2,
                                    "cut.scale=DS shared.weight= shared.bias= "
                                    "whole.weight= whole.bias="));
}
