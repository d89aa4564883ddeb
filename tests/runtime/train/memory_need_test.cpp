#include "tests/support/catch.hpp"

#include "runtime/plan/planner.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/optimizers.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"
#include "smp/smp.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

// What `smp-train check` says of memory, beside what ranks then have.

using namespace smp;
using torch::Tensor;

namespace {

uint64_t bytes_of(const Tensor& x) {
  return x.defined() ? x.nbytes() : 0;
}

uint64_t state_bytes(const torch::optim::OptimizerParamState& x) {
  using namespace torch::optim;
  if (auto* y = dynamic_cast<const AdamWParamState*>(&x))
    return bytes_of(y->exp_avg()) + bytes_of(y->exp_avg_sq());
  if (auto* y = dynamic_cast<const AdagradParamState*>(&x))
    return bytes_of(y->sum());
  if (auto* y = dynamic_cast<const SGDParamState*>(&x))
    return bytes_of(y->momentum_buffer());
  throw std::invalid_argument{"the test does not know this optimizer"};
}

/// What this rank has.
memory_need found_on(distributed_model_base& model,
                     distributed_optimizer& optimizer) {
  memory_need result;
  for (auto& x : model.local_parameters())
    result.parameters += bytes_of(x);
  for (auto& x : model.local_buffers())
    result.parameters += bytes_of(x);
  std::set<const void*> counted;
  auto add_gradient = [&](const Tensor& of) {
    auto& x = of.grad();
    if (x.defined() && counted.insert(x.unsafeGetTensorImpl()).second)
      result.gradients += bytes_of(x);
  };
  auto& map = model.state().map();
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& x = tensors[i].tensor;
    if (tensors[i].is_buffer || !map.owned(i))
      continue;
    add_gradient(x);
    auto part = optimizer.part_of(x, map.slice(i));
    if (!part)
      continue;
    if (part->is_master)
      result.optimizer += bytes_of(part->values);
    else
      add_gradient(part->values);
    result.optimizer += bytes_of(part->average);
  }
  // All that is there, whatever it is of.
  for (auto& [of, state] : optimizer.inner().state())
    result.optimizer += state_bytes(*state);
  auto* buckets = model.state().buckets();
  if (buckets != nullptr && !buckets->shards().empty())
    result.buckets = buckets->take_counts().peak_bytes - result.gradients;
  auto stages = session::current().internals().communication();
  result.arenas = stages.send_arena.capacity + stages.receive_arena.capacity;
  return result;
}

/// Bytes of tensors that an update makes: at most, and those that stay.
test::live_bytes bytes_of_update(distributed_optimizer& optimizer) {
  auto bytes = std::make_shared<test::live_bytes>();
  c10::DebugInfoGuard count{c10::DebugInfoKind::PROFILER_STATE, bytes};
  optimizer.step();
  return *bytes;
}

/// Whether what is on its way between replicas are rows that were updated, each
/// large enough to come from memory to memory.
bool has_copies_only(const train_config& x) {
  return x.smp.shard_optimizer_state && !x.smp.shard_gradients
         && x.model.width >= 256;
}

/// By pp_rank, of the first of those that share modules; of rows that replicas
/// share the most that one has.
std::vector<memory_need> needs_found(const train_config& x) {
  std::vector<memory_need> result(x.smp.pipeline_parallel_degree);
  std::mutex mutex;
  virtual_world_options world;
  world.config = x.smp;
  run_virtual_world(ranks_of(x), world, [&](session&) {
    auto whole = [&] {
      std::unique_lock guard{mutex}; // they share a generator
      return make_trainable(x);
    }();
    auto data = make_data(x, replicas_of(x));
    auto model = whole->distribute();
    std::vector<Tensor> parameters;
    for (auto& [name, p] : whole->named_parameters())
      parameters.push_back(p);
    auto inner = make_optimizer(x.optimizer, parameters);
    distributed_optimizer optimizer{*inner,
                                    {.ema_decay = x.optimizer.ema_decay}};
    begin_run(x, *whole, *data, *model);
    auto train_step = step([&](const batch& xs) {
      auto loss = whole->loss(xs);
      model->backward(loss);
      return loss;
    });
    train_step(data->training_batch(0));
    auto first_update = bytes_of_update(optimizer);
    auto mine = found_on(*model, optimizer);
    if (has_copies_only(x)) // besides the state, which is new
      mine.buckets = static_cast<uint64_t>(first_update.now) - mine.optimizer;
    if (x.smp.bf16_params) {
      // Now that the optimizer has its state.
      train_step(data->training_batch(1));
      mine.updates = static_cast<uint64_t>(bytes_of_update(optimizer).peak);
    }
    std::unique_lock guard{mutex};
    auto& most = result[pp_rank()];
    if (tp_rank() == 0) {
      most.parameters = std::max(most.parameters, mine.parameters);
      most.gradients = std::max(most.gradients, mine.gradients);
      most.optimizer = std::max(most.optimizer, mine.optimizer);
      most.buckets = std::max(most.buckets, mine.buckets);
      most.updates = std::max(most.updates, mine.updates);
      most.arenas = std::max(most.arenas, mine.arenas);
    }
  });
  return result;
}

train_config gpt_over(uint64_t ranks) {
  auto x = test::gpt_case(ranks, "interleaved", 2).config;
  x.model.width = 32;
  x.model.vocabulary = 64;
  return x;
}

std::vector<train_config> configurations() {
  std::vector<train_config> result{gpt_over(2)};
  auto add = [&](uint64_t pipeline, uint64_t ranks) -> train_config& {
    auto& x = result.emplace_back(gpt_over(pipeline));
    x.smp.ddp = ranks > pipeline;
    if (x.smp.ddp)
      x.ranks = ranks;
    return x;
  };
  add(2, 2).smp.bf16_params = true;
  add(1, 1).optimizer.type = "adagrad";
  add(2, 2).optimizer.type = "adagrad";
  add(1, 1).optimizer.ema_decay = 0.9;
  auto& momentum = add(2, 2);
  momentum.optimizer.type = "sgd";
  momentum.optimizer.momentum = 0.9;
  add(2, 2).smp.device_path = {
    .force = true, .send_arena = 1, .receive_arena = 2};
  add(2, 4).smp.shard_optimizer_state = true;
  auto& large = add(1, 2);
  large.smp.shard_optimizer_state = true;
  large.model.width = 256;
  for (uint64_t pipeline : {1, 2}) {
    auto& parts = add(pipeline, 2 * pipeline);
    parts.smp.shard_optimizer_state = parts.smp.shard_gradients = true;
  }
  auto& at_once = add(1, 2);
  at_once.smp.shard_optimizer_state = at_once.smp.shard_gradients = true;
  at_once.smp.overlapping_allreduce = false;
  for (auto optimize : {"memory", "speed"}) {
    auto& shared = add(2, 4);
    shared.smp.tensor_parallel_degree = 2;
    shared.smp.tensor_parallel_modules = {"transformer.h", "transformer.wte"};
    shared.smp.optimize = optimize;
    shared.model.tied = false;
  }
  auto& both = add(1, 4);
  both.smp.tensor_parallel_degree = 2;
  both.smp.tensor_parallel_modules = {"transformer.h"};
  both.smp.shard_optimizer_state = both.smp.bf16_params = true;
  auto& table = add(1, 4); // nearly all that is shared
  table.smp.tensor_parallel_degree = 2;
  table.smp.tensor_parallel_modules = {"transformer.wte"};
  table.smp.shard_optimizer_state = true;
  table.model.tied = false;
  table.model.vocabulary = 2048;
  return result;
}

} // namespace

TEST_CASE("what ranks need is known before they start",
          "[runtime][plan][memory]") {
  for (auto& x : configurations()) {
    INFO(to_toml(x));
    std::vector<memory_need> said;
    int64_t largest = 0; // numbers of a parameter
    decide_alone(x, [&](lone_decision& run) {
      said = needs_of(run.model(), run.decision, x);
      for (auto& t : run.model().tensors)
        largest = std::max(largest, t.tensor.numel());
    });
    auto found = needs_found(x);
    REQUIRE(said.size() == found.size());
    for (size_t i = 0; i < said.size(); ++i) {
      INFO("device " << i);
      auto near = [](uint64_t a, uint64_t b) {
        auto y = static_cast<double>(b);
        return Catch::Approx(y).epsilon(0.05) == static_cast<double>(a);
      };
      CHECK(said[i].parameters == found[i].parameters);
      CHECK(said[i].arenas == found[i].arenas);
      if (has_copies_only(x))
        CHECK(near(said[i].buckets, found[i].buckets));
      CHECK(near(said[i].gradients, found[i].gradients));
      CHECK(near(said[i].optimizer, found[i].optimizer));
      // An update frees the copy of what the last one sent. AdamW makes two
      // float32 tensors like a parameter, and some of one number; rows are
      // copied to be sent.
      auto besides = x.smp.shard_optimizer_state
                       ? said[i].updates
                       : 2 * 4 * static_cast<uint64_t>(largest) + 1024;
      CHECK(found[i].updates <= said[i].updates + besides);
      // A weight that modules of two devices use fills its bucket once more.
      if (!x.smp.shard_gradients || x.smp.pipeline_parallel_degree > 1)
        continue;
      // At most two buckets, or one if all replicas are equally fast, and a
      // copy of what was updated.
      auto travels = said[i].buckets - said[i].parameters / 2;
      if (!x.smp.overlapping_allreduce) {
        // All at the end of a step, of which there are no parts yet.
        CHECK(near(travels, found[i].buckets + found[i].gradients));
        continue;
      }
      CHECK(travels >= 0.95 * static_cast<double>(found[i].buckets));
      CHECK(travels <= 2.1 * static_cast<double>(found[i].buckets));
    }
  }
}
