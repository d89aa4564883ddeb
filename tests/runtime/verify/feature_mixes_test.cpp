// ctest: timeout=600 label=proof
#include "tests/support/catch.hpp"

#include "runtime/verify/verify.hpp"
#include "tests/support/torch_verify_jobs.hpp"

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
    x.smp.ddp = tp * dp > 1;
    x.smp.tensor_parallel_degree = tp;
    if (x.smp.ddp) {
      x.ranks = pp * tp * dp;
      draw_replication(x);
    }
    if (tp > 1)
      draw_sharing(x);
    draw_calls(x);
    // A tied table by itself is not shared, and then nothing is.
    x.smp.prescaled_batch = tp > 1 && maybe(0.3)
                            && !(x.model.tied.value_or(false)
                                 && x.smp.tensor_parallel_modules.front()
                                      == "transformer.wte");
    draw_precision(x);
    x.data.batch_size = 4 * one_of<uint64_t>({1, 2});
    x.optimizer.type = one_of<std::string>(
      {"adamw", "adamw", "adam", "sgd", "adagrad"});
    x.optimizer.fused = x.optimizer.type != "adagrad" && maybe(0.3);
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
      x.smp.activation_checkpointing.modules = {one_of<std::string>(
        {"transformer.h", "transformer.h.*.mlp", "transformer.h.1"})};
    x.smp.static_mode = maybe(0.3);
    x.smp.fast_mode = one_of<std::optional<bool>>({std::nullopt, true, false});
  }

  void draw_precision(train_config& x) {
    x.smp.bf16_params = maybe(0.3);
    if (maybe(0.3))
      x.optimizer.loss_scale = maybe() ? loss_scale_setting{.dynamic = true}
                                       : loss_scale_setting{.fixed = 128};
    if (maybe(0.3))
      x.optimizer.ema_decay = 0.9;
  }

  std::mt19937 random_;
};

} // namespace

TEST_CASE("Features in any mix give the numbers of one process",
          "[runtime][verify][R35]") {
  mixer mixes{20261123};
  for (int i = 0; i < 50; ++i) {
    auto x = mixes.draw();
    INFO("mix " << i << "\n" << x.name);
    auto summary = test::run_case(x, steps_to_verify(x.config));
    CHECK(to_text(summary).starts_with("equal: "));
    CHECK(summary.losses.compared > 0);
    CHECK(summary.gradients.compared > 0);
    CHECK(summary.updates.compared > 0);
  }
}
