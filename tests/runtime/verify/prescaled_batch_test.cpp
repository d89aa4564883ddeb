// ctest: seconds=23
#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <torch/nn/modules/linear.h>

#include <mutex>
#include <string>
#include <vector>

// Ranks that share modules and have the same samples (smp.prescaled_batch).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

void compare(verify_case x, uint64_t tensor, uint64_t replicas,
             const std::string& modules, const std::string& optimize) {
  auto& smp = x.config.smp;
  smp.ddp = true;
  smp.prescaled_batch = true;
  smp.optimize = optimize;
  smp.tensor_parallel_degree = tensor;
  smp.tensor_parallel_modules = {modules};
  x.config.ranks = smp.pipeline_parallel_degree * tensor * replicas;
  INFO(x.name << ", \"" << modules << "\" for " << optimize << ", " << tensor
              << " share, " << replicas << " replicas");
  CHECK_THAT(to_text(run_case(x, 5)),
             Catch::Matchers::StartsWith("equal: 5 steps"));
}

struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    return fc(x);
  }

  submodule<torch::nn::Linear> fc{8, 8};
};
TORCH_MODULE_IMPL(net, net_impl);

/// @param inputs of each rank of one group
/// @returns what a step fails with on each
std::vector<std::string> failures(const std::vector<Tensor>& inputs) {
  std::vector<std::string> result(inputs.size());
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = inputs.size();
  world.config.tensor_parallel_modules = {"*"};
  world.config.ddp = true;
  world.config.prescaled_batch = true;
  world.config.microbatches = 2;
  world.config.threads = 1;
  world.reorder = true;
  run_virtual_world(inputs.size(), world, [&](session& s) {
    distributed_model model{seeded([] { return net{}; })};
    auto train_step = training_step(model, mean_square_of);
    auto why = error_of([&] { train_step(inputs[s.rank()]); });
    // The session goes on.
    train_step(torch::ones({4, 8}));
    std::unique_lock guard{mutex};
    result[s.rank()] = data_rank() == 0 && data_size() == 1 ? why : "a part";
  });
  return result;
}

} // namespace

TEST_CASE("ranks with the same samples compute what one process does",
          "[runtime][session][tensor_parallel][R58]") {
  for (std::string optimize : {"speed", "memory"}) {
    for (uint64_t ranks : {1, 2}) {
      auto x = gpt_case(ranks, "interleaved", 2);
      x.config.model.dropout = 0.2;
      x.config.optimizer.clip_grad_norm = 0.1;
      compare(x, 2, 1, "transformer.h.*", optimize);
      compare(x, 2, 2, "transformer.h.*", optimize);
    }
    auto four = gpt_case(1, "interleaved", 2);
    four.config.model.dropout = 0.2;
    four.config.model.heads = 4;
    compare(four, 4, 1, "transformer.h.*", optimize);
    for (auto model : {"hf_bert", "hf_gpt2"})
      compare(script_case(model, 2, 2), 2, 1, "*", optimize);
    compare(script_case("hf_gpt2", 1, 2), 2, 2, "*", optimize);
  }
}

TEST_CASE("blocks of T5 with the same samples compute what one process does",
          "[runtime][session][tensor_parallel][R58]") {
  for (std::string optimize : {"speed", "memory"}) {
    auto x = gpt_case(2, "interleaved", 2);
    auto& model = x.config.model;
    model.type = "t5";
    model.layers = 2;
    model.decoder_layers = 2;
    model.heads = 4;
    model.dropout = 0.2;
    model.gated = true;
    compare(x, 2, 1, "*coder.block.*", optimize);
  }
}

TEST_CASE("single modules with the same samples compute what one process does",
          "[runtime][session][tensor_parallel][R58]") {
  for (auto modules : {"*.mlp.*", "transformer.wte", "transformer.wpe",
                       "transformer.ln_f", "lm_head"})
    compare(gpt_case(2, "interleaved", 2), 2, 1, modules, "memory");
  for (auto model : {"hf_llama", "dropout"})
    compare(script_case(model, 2, 2), 2, 1, "*", "memory");
}

TEST_CASE("peers with other samples than they should have get an error",
          "[runtime][session][tensor_parallel][R58]") {
  auto x = torch::arange(32.0).view({4, 8});
  auto other = x.clone();
  other[3][7] = 5;
  for (auto& why : failures({x, other}))
    CHECK_THAT(why, ContainsSubstring("smp.prescaled_batch = true, but ranks 0 "
                                      "and 1 were given different samples")
                      && ContainsSubstring("smp::data_rank()"));
  for (auto& why : failures({x, x, x, torch::ones({8, 8})}))
    CHECK_THAT(why, ContainsSubstring("ranks 0 and 3 were given different "
                                      "samples"));
  for (auto& why : failures({x, x}))
    CHECK(why == "no error");
}
