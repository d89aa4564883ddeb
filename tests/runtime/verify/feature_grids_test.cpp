// ctest: seconds=159 label=proof
#include "tests/support/catch.hpp"

#include "runtime/verify/verify.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

// What replicas have of data parallelism, precision and memory, one feature
// after the other and all together, in each grid of ranks, against one process
// (R35).

using namespace smp;

namespace {

struct feature {
  const char* name;
  std::function<void(train_config&)> set;
  /// Goes with all others.
  bool common = true;
};

std::vector<feature> features() {
  return {
    {"none", [](auto&) {}},
    {"optimizer state in parts",
     [](auto& x) { x.smp.shard_optimizer_state = true; }},
    {"gradients in parts",
     [](auto& x) {
       x.smp.shard_optimizer_state = x.smp.shard_gradients = true;
       x.smp.bucket_cap_mb = 1;
     }},
    {"the same bits in each run",
     [](auto& x) { x.smp.deterministic_server = true; }},
    {"buffers of the first", [](auto& x) { x.smp.broadcast_buffers = true; }},
    {"computed again, from a file",
     [](auto& x) {
       x.smp.activation_checkpointing.modules = {"*.h.*"};
       x.smp.offload_activations = true;
       // Of 8 KB in half precision: less than 4 KB stays in memory, and so may
       // the last call before backward.
       x.model.width = 64;
       x.data.sequence_length = 16;
       x.smp.activation_loading_horizon = 1;
     }},
    {"bfloat16 parameters", [](auto& x) { x.smp.bf16_params = true; }},
    {"float16 parameters", [](auto& x) { x.smp.fp16_params = true; }, false},
    {"autocast to bfloat16", [](auto& x) { x.train.dtype = "bfloat16"; },
     false},
    {"scaled loss",
     [](auto& x) {
       x.optimizer.loss_scale = loss_scale_setting{.fixed = 128};
     }},
    {"clipped", [](auto& x) { x.optimizer.clip_grad_norm = 0.1; }},
    {"averages and one pass",
     [](auto& x) {
       x.optimizer.ema_decay = 0.9;
       x.optimizer.fused = true;
     }},
  };
}

/// Of pipelines, for as few grids as can be.
std::vector<feature> more_features() {
  auto again = [](const char* strategy) {
    return [strategy](train_config& x) {
      x.smp.activation_checkpointing.modules = {"transformer.h"};
      x.smp.activation_checkpointing.strategy = strategy;
    };
  };
  return {
    {"two blocks computed again together", again("group_2")},
    {"all blocks of a rank computed again together", again("contiguous")},
    {"a scale that changes",
     [](auto& x) {
       x.optimizer.loss_scale = loss_scale_setting{.dynamic = true};
     }},
    {"gradients in parts, in several buckets",
     [](auto& x) {
       // Weights of 576 KB: half of one travels alone after the update.
       x.model.width = 192;
       x.smp.shard_optimizer_state = x.smp.shard_gradients = true;
       x.smp.bucket_cap_mb = 1;
     }},
  };
}

struct grid {
  uint64_t pipeline = 1;
  uint64_t tensor = 1;
};

void place(train_config& x, const grid& of) {
  x.smp.ddp = true;
  x.smp.tensor_parallel_degree = of.tensor;
  x.ranks = 2 * of.pipeline * of.tensor;
}

/// @returns what each rank did besides
std::vector<test::rank_counts> check_equal(const test::verify_case& x,
                                           const std::string& what,
                                           bool split = false) {
  INFO(what << "\n" << to_toml(x.config));
  auto steps = std::max<uint64_t>(5, steps_to_verify(x.config));
  std::vector<test::rank_counts> result;
  auto summary = test::run_case(x, steps, split, &result);
  CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: "));
  CHECK(summary.losses.compared >= 5);
  CHECK(summary.gradients.compared > 0);
  CHECK(summary.updates.compared > 0);
  return result;
}

bool offloads(const test::rank_counts& x) {
  return x.offloaded_bytes > 0;
}

test::verify_case gpt_in(const grid& of) {
  auto result = test::gpt_case(of.pipeline, "interleaved", 2);
  place(result.config, of);
  if (of.tensor > 1)
    result.config.smp.tensor_parallel_modules = {"transformer.h"};
  return result;
}

/// Every rank has two blocks.
void check_gpt(const test::verify_case& x, const std::string& what) {
  CAPTURE(what);
  auto ranks = check_equal(x, what);
  if (x.config.smp.offload_activations)
    CHECK(std::ranges::all_of(ranks, offloads));
}

} // namespace

TEST_CASE("each feature alone and all together are right in each grid",
          "[runtime][verify][R35]") {
  auto of = GENERATE(grid{1, 1}, grid{2, 1}, grid{1, 2}, grid{2, 2});
  CAPTURE(of.pipeline, of.tensor);
  auto all = gpt_in(of);
  for (auto& f : features()) {
    auto one = gpt_in(of);
    f.set(one.config);
    check_gpt(one, f.name);
    if (f.common)
      f.set(all.config);
  }
  check_gpt(all, "all");
}

TEST_CASE("more features are right in a pipeline", "[runtime][verify][R35]") {
  auto of = GENERATE(grid{2, 1}, grid{1, 2}, grid{2, 2});
  CAPTURE(of.pipeline, of.tensor);
  for (auto& f : more_features()) {
    auto x = gpt_in(of);
    f.set(x.config);
    CAPTURE(f.name);
    auto ranks = check_equal(x, f.name);
    // One for each kind is none of several.
    if (x.config.smp.shard_gradients)
      CHECK(std::ranges::all_of(ranks, [](auto& y) { return y.buckets > 2; }));
  }
}

TEST_CASE("a TorchScript model has them, too", "[runtime][verify][R35]") {
  auto of = GENERATE(grid{1, 1}, grid{2, 1}, grid{1, 2}, grid{2, 2});
  CAPTURE(of.pipeline, of.tensor);
  test::scratch_dir dir;
  auto make = [&] {
    auto result = test::script_case("hf_gpt2", of.pipeline, 2);
    auto& x = result.config;
    place(x, of);
    if (of.tensor > 1)
      x.smp.tensor_parallel_modules = {"*"};
    x.data.path = test::longer_batch(x.data.path, dir);
    return result;
  };
  auto check = [&](const test::verify_case& x, const std::string& what) {
    CAPTURE(what);
    auto ranks = check_equal(x, what, of.pipeline > 1);
    if (x.config.smp.offload_activations)
      CHECK(std::ranges::any_of(ranks, offloads));
  };
  auto all = make();
  for (auto& f : features()) {
    auto one = make();
    f.set(one.config);
    check(one, f.name);
    if (f.common)
      f.set(all.config);
  }
  check(all, "all");
}
