// ctest: seconds=26 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/trainer.hpp"
#include "smp/smp.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/scratch_dir.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <malloc.h>

// What `smp-train check` says of activations, beside the bytes of tensors that
// ranks then have: this program starts itself as the ranks of a run.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

// -- a rank -------------------------------------------------------------------

std::atomic<int64_t> live_bytes_of_tensors = 0;
std::atomic<int64_t> most_bytes_of_tensors = 0;

/// Counts the bytes of all tensors.
class counting_allocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* p = bytes == 0 ? nullptr : ::aligned_alloc(64, (bytes + 63) & ~63ull);
    auto live = live_bytes_of_tensors += size_of(p);
    auto most = most_bytes_of_tensors.load();
    while (live > most
           && !most_bytes_of_tensors.compare_exchange_weak(most, live))
      ;
    return {p, p, &release, c10::Device{c10::kCPU}};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

private:
  static int64_t size_of(void* p) {
    return p == nullptr ? 0 : static_cast<int64_t>(::malloc_usable_size(p));
  }

  static void release(void* p) {
    live_bytes_of_tensors -= size_of(p);
    ::free(p);
  }
};

} // namespace

TEST_CASE("rank whose activations are counted", "[.rank]") {
  static counting_allocator counting;
  c10::SetCPUAllocator(&counting, 200);
  auto x = load_config(std::string{std::getenv("TEST_DIR")} + "/job.toml");
  session s{x.smp};
  auto whole = make_trainable(x);
  auto data = make_data(x, 1);
  auto model = whole->distribute();
  begin_run(x, *whole, *data, *model);
  auto train_step = step([&](const batch& xs) {
    auto loss = whole->loss(xs);
    model->backward(loss);
    return loss;
  });
  model->partition();
  // What is there whatever microbatches do: parameters, a batch, and gradients
  // from the first step on. Memory that the transport keeps counts.
  int64_t always = 0;
  for (auto& p : model->local_parameters())
    always += static_cast<int64_t>(p.nbytes());
  int64_t most = 0;
  for (uint64_t i = 0; i < 3; ++i) {
    auto batch = data->training_batch(i);
    barrier();
    if (i == 0)
      always += live_bytes_of_tensors;
    most_bytes_of_tensors = live_bytes_of_tensors.load();
    train_step(batch);
    if (i > 0)
      most = std::max(most, most_bytes_of_tensors - always);
    barrier();
  }
  std::ofstream{fmt::format("{}/most-{}", std::getenv("TEST_DIR"), s.rank())}
    << most;
}

TEST_CASE("rank whose forward phase is counted", "[.rank]") {
  static counting_allocator counting;
  c10::SetCPUAllocator(&counting, 200);
  auto x = load_config(std::string{std::getenv("TEST_DIR")} + "/job.toml");
  session s{x.smp};
  auto whole = make_trainable(x);
  auto data = make_data(x, data_size());
  auto model = whole->distribute();
  begin_run(x, *whole, *data, *model);
  int64_t kept = 0;
  auto train_step = step([&](const batch& xs) {
    auto before = live_bytes_of_tensors.load();
    auto loss = whole->loss(xs);
    kept = live_bytes_of_tensors - before;
    model->backward(loss);
    return loss;
  });
  model->partition();
  for (uint64_t i = 0; i < 2; ++i) { // in the first one more may be made
    auto batch = data->training_batch(i, {data_rank(), data_size()});
    barrier();
    train_step(batch);
  }
  barrier();
  std::ofstream{fmt::format("{}/most-{}", std::getenv("TEST_DIR"), s.rank())}
    << kept;
}

// -- the test -----------------------------------------------------------------

namespace {

/// Blocks, of which the last device has the second half.
train_config blocks_over(uint64_t ranks, const std::string& pipeline,
                         uint64_t layers = 8) {
  train_config x;
  x.smp.pipeline_parallel_degree = ranks;
  x.smp.pipeline = pipeline;
  x.smp.microbatches = 8;
  x.smp.threads = 1;
  x.smp.auto_partition = false;
  if (ranks > 1)
    for (auto i = layers / 2; i < layers; ++i)
      x.manual_partition.emplace(fmt::format("transformer.h.{}", i), 1);
  x.model.type = "gpt";
  x.model.layers = layers;
  x.model.heads = 2;
  x.model.width = 64;
  x.model.vocabulary = 64;
  x.model.dropout = 0.1;
  x.data.type = "synthetic";
  x.data.sequence_length = 64;
  x.data.batch_size = 16;
  x.train.steps = 1;
  return x;
}

activation_need said_of(const train_config& x) {
  activation_need result;
  decide_alone(x, [&](lone_decision& run) { result = activations_of(run, x); });
  INFO(result.unknown);
  REQUIRE(result.unknown.empty());
  return result;
}

/// @param rank the test case that is one
/// @returns by rank
std::vector<uint64_t>
found_of(const train_config& x,
         const std::string& rank = "rank whose activations are counted") {
  scratch_dir dir;
  dir.write("job.toml", to_toml(x));
  require_case(dir, rank, ranks_of(x));
  std::vector<uint64_t> result;
  for (uint64_t i = 0; i < ranks_of(x); ++i)
    result.push_back(std::stoull(dir.read(fmt::format("most-{}", i))));
  return result;
}

std::vector<train_config> counted_jobs() {
  std::vector<train_config> result;
  auto add = [&](uint64_t ranks, const std::string& pipeline) -> train_config& {
    return result.emplace_back(blocks_over(ranks, pipeline));
  };
  add(1, "simple");
  add(2, "simple");
  add(2, "simple").train.dtype = "bfloat16";
  add(2, "simple").smp.bf16_params = true;
  auto again = [&](uint64_t ranks, const std::string& strategy) -> auto& {
    // Many, beside what one of them needs while it is computed.
    auto& x = result.emplace_back(blocks_over(ranks, "simple", 16));
    x.smp.microbatches = 64;
    x.data.batch_size = 128;
    x.smp.activation_checkpointing.modules = {"transformer.h"};
    x.smp.activation_checkpointing.strategy = strategy;
    return x;
  };
  again(1, "each");
  again(2, "each");
  again(2, "group_2");
  return result;
}

} // namespace

TEST_CASE("activations are known before ranks start",
          "[runtime][plan][memory]") {
  for (auto& x : counted_jobs()) {
    INFO(to_toml(x));
    auto said = said_of(x).predicted;
    CHECK(said == said_of(x).bound);
    auto found = found_of(x);
    REQUIRE(said.size() == found.size());
    for (size_t i = 0; i < said.size(); ++i) {
      INFO("device " << i << ": said " << said[i] << ", found " << found[i]);
      auto all = static_cast<double>(said[i]);
      // What is computed again need not be there when most is kept.
      auto again = !x.smp.activation_checkpointing.modules.empty();
      CHECK(static_cast<double>(found[i]) >= (again ? 0.85 : 0.95) * all);
      CHECK(static_cast<double>(found[i]) <= 1.05 * all);
    }
  }
}

TEST_CASE(
  "a schedule with fewer microbatches at a time keeps less, and a file "
  "takes arguments away",
  "[runtime][plan][memory]") {
  auto x = blocks_over(2, "simple");
  auto all = said_of(x).predicted;
  x.smp.pipeline = "1f1b";
  auto fewer = said_of(x);
  auto found = found_of(x);
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(fewer.predicted[i] < all[i]);
    CHECK(fewer.predicted[i] <= fewer.bound[i]);
    CHECK(fewer.bound[i] < all[i]);
    CHECK(static_cast<double>(found[i])
          <= 1.05 * static_cast<double>(fewer.bound[i]));
  }
  x.smp.pipeline = "simple";
  x.smp.activation_checkpointing.modules = {"transformer.h"};
  auto again = said_of(x).predicted;
  x.smp.offload_activations = true;
  x.smp.activation_loading_horizon = 1;
  auto in_file = said_of(x).predicted;
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(again[i] < all[i] / 2);
    CHECK(in_file[i] < again[i]);
  }
}

namespace {

/// In one microbatch, so that all is kept that its forward phase leaves.
train_config shared_blocks(const std::vector<std::string>& modules) {
  auto x = blocks_over(1, "simple");
  x.smp.microbatches = 1;
  x.smp.ddp = true;
  x.smp.tensor_parallel_degree = 2;
  x.smp.tensor_parallel_modules = modules;
  return x;
}

std::vector<train_config> shared_jobs() {
  const std::string layers = "transformer.h";
  const std::vector<std::string> all{layers, "transformer.wte", "lm_head"};
  std::vector<train_config> result{shared_blocks({layers}), shared_blocks(all),
                                   shared_blocks({layers}), shared_blocks(all),
                                   shared_blocks({"transformer.h.*.mlp.*"})};
  result[1].smp.prescaled_batch = true;
  result[2].smp.optimize = "speed";
  result[3].smp.optimize = "speed";
  result[3].train.dtype = "bfloat16";
  return result;
}

} // namespace

TEST_CASE("what modules keep that ranks share is known before these start",
          "[runtime][plan][memory][tensor_parallel]") {
  for (auto& x : shared_jobs()) {
    INFO(to_toml(x));
    auto said = said_of(x).predicted;
    REQUIRE(said.size() == 1);
    auto found = found_of(x, "rank whose forward phase is counted").front();
    INFO("said " << said[0] << ", found " << found);
    CHECK(static_cast<double>(found) >= 0.95 * static_cast<double>(said[0]));
    CHECK(static_cast<double>(found) <= 1.05 * static_cast<double>(said[0]));
  }
  CHECK_THAT(plan_model(shared_blocks({"transformer.h"})).text,
             ContainsSubstring("of modules that ranks share estimated"));
}

TEST_CASE("a model is whole again after it was measured as ranks share it",
          "[runtime][plan][memory][tensor_parallel]") {
  auto x = shared_blocks({"transformer.h", "transformer.wte", "lm_head"});
  decide_alone(x, [&](lone_decision& run) {
    auto tensors = [&] {
      std::vector<std::pair<const void*, std::vector<int64_t>>> result;
      for (auto& t : run.model().tensors)
        result.emplace_back(t.tensor.const_data_ptr(), t.tensor.sizes().vec());
      return result;
    };
    auto before = tensors();
    auto unknown = activations_of(run, x).unknown;
    assertion_lock lock;
    CHECK(unknown.empty());
    CHECK(tensors() == before);
    CHECK_FALSE(run.state.map().any_shared());
    for (auto& m : run.model().modules)
      for (auto* hook : m.hooks)
        CHECK(hook->distributed == nullptr);
  });
}

TEST_CASE("an observer of calls is back after activations were measured",
          "[runtime][plan][memory]") {
  auto x = blocks_over(2, "simple");
  call_interceptor observer;
  call_interceptor* after = nullptr;
  std::string unknown;
  decide_alone(x, [&](lone_decision& run) {
    set_interceptor(interceptor::observe, &observer);
    unknown = activations_of(run, x).unknown;
    after = interceptor_at(static_cast<size_t>(interceptor::observe));
    set_interceptor(interceptor::observe, nullptr);
  });
  CHECK(unknown.empty());
  CHECK(after == &observer);
}

namespace {

/// What rank 0 of a run is told and tells when it begins.
struct begin_listener final : train_listener {
  explicit begin_listener(const train_config& config) : config(config) {
    // nop
  }

  void on_decision(const partition_decision& x, session& s, model_state& state,
                   trainable& whole) override {
    decision = x;
    lone_decision run{s, state, whole, x};
    said = activations_at_start(run, config);
  }

  void on_start(const train_start&) override {
    // nop
  }

  void on_step(const step_metrics& x) override {
    loss = x.loss;
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

  const train_config& config;
  std::optional<partition_decision> decision;
  activation_need said;
  double loss = 0;
};

/// Trains for a step, on ranks that are threads.
void begin(const train_config& x, begin_listener& first) {
  scratch_dir dir;
  const std::atomic<bool> stop = false;
  virtual_world_options world;
  world.config = x.smp;
  run_virtual_world(ranks_of(x), world, [&](session& s) {
    begin_listener other{x};
    train(s, x, dir.path, s.rank() == 0 ? first : other, stop);
  });
}

} // namespace

TEST_CASE("a run knows activations when it begins, where it sees the model run",
          "[runtime][plan][memory]") {
  auto x = blocks_over(2, "interleaved");
  SECTION("without others that share modules") {
    // nop
  }
  SECTION("with one") {
    x.smp.ddp = true;
    x.smp.tensor_parallel_degree = 2;
    x.smp.tensor_parallel_modules = {"transformer.h.0"};
  }
  x.threads_as_ranks = true;
  x.smp.auto_partition = true;
  begin_listener measured{x};
  begin(x, measured);
  REQUIRE(measured.decision);
  CHECK(measured.said.unknown.empty());
  REQUIRE(measured.said.predicted.size() == 2);
  activation_need alone;
  decide_alone(x, [&](lone_decision& run) {
    run.decision = *measured.decision;
    alone = activations_of(run, x);
  });
  CHECK(measured.said.predicted == alone.predicted);
  CHECK(measured.said.bound == alone.bound);
  // Nothing of it stays.
  auto without = x;
  without.smp.trace_device = "none";
  begin_listener plain{without};
  begin(without, plain);
  CHECK(plain.said.unknown == "smp.trace_device is none");
  CHECK(measured.loss == Catch::Approx(plain.loss));
  // A part of what all blocks of one microbatch would take.
  auto again = x;
  again.smp.activation_checkpointing.modules = {"transformer.h"};
  begin_listener refused{again};
  begin(again, refused);
  CHECK_THAT(refused.said.unknown, ContainsSubstring("smp-train check"));
}

TEST_CASE(
  "a run knows activations of smp's models also where it decides "
  "nothing",
  "[runtime][plan][memory]") {
  auto x = blocks_over(GENERATE(1, 2), "simple");
  x.threads_as_ranks = true;
  begin_listener measured{x};
  begin(x, measured);
  REQUIRE(measured.decision);
  CHECK_FALSE(measured.decision->traced);
  CHECK(measured.said.unknown.empty());
  CHECK(measured.said.predicted == said_of(x).predicted);
  auto without = x;
  without.smp.trace_device = "none";
  begin_listener plain{without};
  begin(without, plain);
  CHECK(plain.said.predicted.empty());
  CHECK(measured.loss == Catch::Approx(plain.loss));
}

TEST_CASE("what cannot be known of activations is not told",
          "[runtime][plan][memory]") {
  auto why = [](const train_config& x) {
    activation_need result;
    decide_alone(x,
                 [&](lone_decision& run) { result = activations_of(run, x); });
    CHECK(result.predicted.empty());
    return result.unknown;
  };
  auto x = blocks_over(2, "simple");
  x.smp.trace_device = "none";
  CHECK(why(x) == "smp.trace_device is none");
  CHECK_THAT(plan_model(x).text, ContainsSubstring("nobody knows here: "
                                                   "smp.trace_device is none"));
}
