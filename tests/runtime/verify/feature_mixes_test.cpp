// ctest: seconds=110 label=proof
#include "tests/support/catch.hpp"

#include "runtime/verify/verify.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

// What is right alone may be wrong together: features of pipelines, shared
// modules, replicas, precision and memory, switched on and off at random, each
// mix against one process (R35).

using namespace smp;

namespace {

/// Draws from what a configuration may say; nothing that it refuses.
class mixer {
public:
  explicit mixer(uint32_t seed) : random_(seed) {
    // nop
  }

  test::verify_case draw() {
    auto pp = one_of<uint64_t>({1, 2});
    auto tp = one_of<uint64_t>({1, 1, 2, 2, 4});
    auto dp = tp == 4 ? 1 : one_of<uint64_t>({1, 2});
    if (pp * tp * dp == 1)
      pp = 2;
    auto result = test::gpt_case(
      pp, one_of<std::string>({"simple", "interleaved", "1f1b"}), 4);
    auto& x = result.config;
    x.model.heads = 4;
    x.smp.strategy = one_of<std::string>({"balanced", "paper"});
    x.smp.ddp = tp * dp > 1;
    x.smp.tensor_parallel_degree = tp;
    if (x.smp.ddp) {
      x.ranks = pp * tp * dp;
      draw_replication(x);
    }
    if (tp > 1)
      draw_sharing(x);
    draw_calls(x);
    // Else all of a kind are in one bucket, and what is less than 4 KB is in no
    // file.
    if (x.smp.offload_activations || maybe(0.1)) {
      x.model.width = 96;
      x.data.sequence_length = 24;
    }
    // A tied table by itself is not shared, and then nothing is.
    x.smp.prescaled_batch = tp > 1 && maybe(0.3)
                            && !(x.model.tied.value_or(false)
                                 && x.smp.tensor_parallel_modules.front()
                                      == "transformer.wte");
    draw_type(x);
    draw_scale(x);
    x.data.batch_size = 4 * one_of<uint64_t>({1, 2});
    x.optimizer.type = one_of<std::string>(
      {"adamw", "adamw", "adam", "sgd", "adagrad"});
    x.optimizer.fused = x.optimizer.type != "adagrad" && maybe(0.3);
    if (maybe(0.3))
      x.optimizer.clip_grad_norm = 0.1;
    result.name = to_toml(x);
    return result;
  }

  /// Of a TorchScript file. @param dir gets its batch
  test::verify_case draw_file(const test::scratch_dir& dir) {
    auto pp = one_of<uint64_t>({1, 2});
    auto tp = one_of<uint64_t>({1, 2});
    auto dp = pp * tp == 1 ? 2 : one_of<uint64_t>({1, 2});
    auto result = test::script_case("hf_gpt2", pp, 2);
    auto& x = result.config;
    x.data.path = test::longer_batch(x.data.path, dir);
    x.smp.ddp = tp * dp > 1;
    x.smp.tensor_parallel_degree = tp;
    if (x.smp.ddp) {
      x.ranks = pp * tp * dp;
      draw_replication(x);
    }
    if (tp > 1) {
      x.smp.tensor_parallel_modules = {"*"};
      x.smp.optimize = one_of<std::string>({"speed", "memory"});
    }
    if (maybe(0.4)) {
      x.smp.activation_checkpointing.modules = {"*.h.*"};
      x.smp.offload_activations = maybe();
    }
    x.smp.deterministic_server = maybe(0.2);
    x.smp.fast_mode = one_of<std::optional<bool>>({std::nullopt, false});
    draw_type(x);
    draw_scale(x);
    x.optimizer.type = one_of<std::string>({"adamw", "adam", "sgd"});
    x.optimizer.fused = maybe(0.3);
    if (maybe(0.3))
      x.optimizer.clip_grad_norm = 0.1;
    result.name = to_toml(x);
    return result;
  }

private:
  bool maybe(double p = 0.5) {
    return std::uniform_real_distribution<>{0, 1}(random_) < p;
  }

  template <class T>
  T one_of(std::vector<T> xs) {
    return xs[std::uniform_int_distribution<size_t>{0, xs.size() - 1}(random_)];
  }

  void draw_replication(train_config& x) {
    x.smp.shard_optimizer_state = maybe();
    x.smp.shard_gradients = x.smp.shard_optimizer_state && maybe();
    x.smp.overlapping_allreduce = maybe(0.8);
    x.smp.broadcast_buffers = maybe(0.2);
    x.smp.bucket_cap_mb = one_of<uint64_t>({1, 25});
  }

  void draw_sharing(train_config& x) {
    // A tied head is shared only with its table.
    x.smp.tensor_parallel_modules = one_of<std::vector<std::string>>(
      {{"transformer.h"},
       {"transformer.*"},
       {"transformer.h.*.attn"},
       {"transformer.h.1.mlp"},
       {"transformer.wte"},
       {"transformer.ln_f"},
       {"lm_head", "transformer.wte"},
       {"*"}});
    x.smp.optimize = one_of<std::string>({"speed", "memory"});
  }

  void draw_calls(train_config& x) {
    x.model.dropout = one_of<double>({0.0, 0.0, 0.2});
    x.model.tied = maybe();
    if (maybe(0.4))
      draw_checkpointing(x);
    x.smp.static_mode = maybe(0.3);
    x.smp.deterministic_server = maybe(0.2);
    x.smp.fast_mode = one_of<std::optional<bool>>({std::nullopt, true, false});
  }

  void draw_checkpointing(train_config& x) {
    auto module = one_of<std::string>(
      {"transformer.h", "transformer.h.*.mlp", "transformer.h.1"});
    auto& again = x.smp.activation_checkpointing;
    again.modules = {module};
    // Of a Sequential.
    if (module == "transformer.h")
      again.strategy = one_of<std::string>({"each", "contiguous", "group_2"});
    x.smp.offload_activations = maybe();
    if (x.smp.offload_activations)
      x.smp.activation_loading_horizon = one_of<uint64_t>({1, 4});
  }

  void draw_type(train_config& x) {
    auto type = one_of<std::string>(
      {"float32", "float32", "float32", "bf16", "fp16", "autocast"});
    x.smp.bf16_params = type == "bf16";
    x.smp.fp16_params = type == "fp16";
    if (type == "autocast")
      x.train.dtype = "bfloat16";
  }

  void draw_scale(train_config& x) {
    if (maybe(0.3))
      x.optimizer.loss_scale = maybe() ? loss_scale_setting{.dynamic = true}
                                       : loss_scale_setting{.fixed = 128};
    if (maybe(0.3))
      x.optimizer.ema_decay = 0.9;
  }

  std::mt19937 random_;
};

/// @param split see `verify_options`
/// @returns how many bytes all ranks had in files
uint64_t check_mix(const test::verify_case& x, bool split) {
  auto steps = std::max<uint64_t>(5, steps_to_verify(x.config));
  std::vector<test::rank_counts> ranks;
  auto summary = test::run_case(x, steps, split, &ranks);
  CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: "));
  CHECK(summary.losses.compared > 0);
  CHECK(summary.gradients.compared > 0);
  CHECK(summary.updates.compared > 0);
  uint64_t offloaded = 0;
  for (auto& rank : ranks)
    offloaded += rank.offloaded_bytes;
  return offloaded;
}

} // namespace

TEST_CASE("Features in any mix give the numbers of one process",
          "[runtime][verify][R35]") {
  mixer mixes{20261123};
  uint64_t offloaded = 0;
  for (int i = 0; i < 50; ++i) {
    auto x = mixes.draw();
    INFO("mix " << i << "\n" << x.name);
    offloaded += check_mix(x, false);
  }
  CHECK(offloaded > 0);
}

TEST_CASE("Features of a TorchScript file in any mix, too",
          "[runtime][verify][R35]") {
  test::scratch_dir dir;
  mixer mixes{20261127};
  uint64_t offloaded = 0;
  for (int i = 0; i < 16; ++i) {
    auto x = mixes.draw_file(dir);
    INFO("mix " << i << "\n" << x.name);
    offloaded += check_mix(x, x.config.smp.pipeline_parallel_degree > 1);
  }
  CHECK(offloaded > 0);
}
