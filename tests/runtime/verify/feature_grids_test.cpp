// ctest: timeout=600 label=proof
#include "tests/support/catch.hpp"

#include "runtime/verify/verify.hpp"
#include "tests/support/torch_verify_jobs.hpp"

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
       x.smp.activation_checkpointing.modules = {"transformer.h"};
       x.smp.offload_activations = true;
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

struct grid {
  uint64_t pipeline = 1;
  uint64_t tensor = 1;
};

void place(train_config& x, const grid& of) {
  x.smp.ddp = true;
  x.smp.tensor_parallel_degree = of.tensor;
  x.ranks = 2 * of.pipeline * of.tensor;
}

void check_equal(const test::verify_case& x, const std::string& what) {
  INFO(what << "\n" << to_toml(x.config));
  auto steps = std::max<uint64_t>(5, steps_to_verify(x.config));
  auto summary = test::run_case(x, steps);
  CHECK(to_text(summary).starts_with("equal: "));
  CHECK(summary.losses.compared >= 5);
  CHECK(summary.gradients.compared > 0);
  CHECK(summary.updates.compared > 0);
}

} // namespace

TEST_CASE("each feature alone and all together are right in each grid",
          "[runtime][verify][R35]") {
  auto of = GENERATE(grid{1, 1}, grid{2, 1}, grid{1, 2}, grid{2, 2});
  CAPTURE(of.pipeline, of.tensor);
  auto make = [&] {
    auto result = test::gpt_case(of.pipeline, "interleaved", 2);
    place(result.config, of);
    if (of.tensor > 1)
      result.config.smp.tensor_parallel_modules = {"transformer.h"};
    return result;
  };
  auto all = make();
  for (auto& f : features()) {
    auto one = make();
    f.set(one.config);
    check_equal(one, f.name);
    if (f.common)
      f.set(all.config);
  }
  check_equal(all, "all");
}

TEST_CASE("a TorchScript model has them, too", "[runtime][verify][R35]") {
  auto make = [] {
    auto result = test::script_case("hf_gpt2", 1, 1);
    place(result.config, {});
    return result;
  };
  auto all = make();
  for (auto& f : features()) {
    // Its modules have other names, and its code knows its types.
    auto name = std::string{f.name};
    if (name.starts_with("computed again") || name.find("float16") != name.npos)
      continue;
    auto one = make();
    f.set(one.config);
    check_equal(one, f.name);
    if (f.common)
      f.set(all.config);
  }
  check_equal(all, "all");
}
