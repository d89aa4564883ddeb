#include "runtime/plan/planner.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/plan/partition_json.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/split.hpp"
#include "runtime/train/memory_need.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <thread>

namespace smp {

namespace {

/// A line on what the ranks need at least.
std::string largest_need(const walked_model& model, const partition_plan& plan,
                         const train_config& x) {
  uint64_t most = 0;
  uint64_t device = 0;
  for (uint64_t i = 0; i < x.smp.pipeline_parallel_degree; ++i) {
    auto bytes = memory_need(model, x, [&](uint32_t tensor) {
      auto home = model.tensors[tensor].modules.front();
      return plan.module_device[home] == i;
    });
    if (bytes > most) {
      most = bytes;
      device = i;
    }
  }
  return fmt::format("memory: up to {} (device {})\n",
                     describe_memory_need(most, x.optimizer), device);
}

/// While it lives, tensor operations have the threads of one rank, as if all of
/// them ran on this machine.
class threads_of_a_rank {
public:
  explicit threads_of_a_rank(const train_config& x)
    : before_(at::get_num_threads()) {
    auto cores = std::max(1u, std::thread::hardware_concurrency());
    auto share = std::max<uint64_t>(1, cores / ranks_of(x));
    at::set_num_threads(
      static_cast<int>(x.smp.threads > 0 ? x.smp.threads : share));
  }

  ~threads_of_a_rank() {
    at::set_num_threads(before_);
  }

  threads_of_a_rank(const threads_of_a_rank&) = delete;
  threads_of_a_rank& operator=(const threads_of_a_rank&) = delete;

private:
  int before_;
};

/// What the first replica gets of the first batch.
batch first_batch(const train_config& x) {
  auto n = replicas_of(x);
  return part_of(make_data(x, n)->training_batch(0), 0, n);
}

} // namespace

printed_plan plan_tree(const std::string& path, partition_options options) {
  auto tree = parse_partition_tree(read_text(path), path);
  options.crossing = tree.crossing();
  auto plan = make_partition(tree.model, options);
  return {print_partition(tree.model, plan, {.colour = true}),
          decision_json(plan)};
}

void try_first_microbatch(const train_config& x) {
  auto fail = [](const std::string& why) {
    throw error{error_code::user_code,
                "the first microbatch fails: " + why.substr(0, why.find('\n'))};
  };
  auto whole = make_trainable(x);
  auto xs = split(first_batch(x), x.smp.microbatches, 0, 0);
  try {
    whole->loss(xs);
  } catch (const error&) {
    throw;
  } catch (const c10::Error& e) {
    fail(e.what_without_backtrace());
  } catch (const std::exception& e) {
    fail(e.what());
  } catch (...) {
    fail("an exception that is no std::exception");
  }
}

void decide_alone(const train_config& x,
                  const std::function<void(session&, const walked_model&,
                                           partition_decision)>& use) {
  const auto devices = x.smp.pipeline_parallel_degree;
  virtual_world_options world;
  world.config = x.smp;
  world.config.active_microbatches = effective_active_microbatches(x.smp);
  world.config.pipeline_parallel_degree = 1;
  world.config.ddp = false;
  world.config.placement_strategy = "cluster";
  world.config.tensor_parallel_degree = 1;
  world.config.tensor_parallel_modules.clear();
  world.config.default_partition = 0; // the other devices are no ranks
  threads_of_a_rank threads{x};
  run_virtual_world(1, world, [&](session& s) {
    // Without a trace only sizes count.
    auto whole = make_trainable(x, x.smp.trace_device == "none"
                                     ? first_values::when_needed
                                     : first_values::now);
    auto data = make_data(x, replicas_of(x));
    auto model = whole->distribute();
    begin_run(x, *whole, *data, *model);
    auto& state = model->state();
    if (state.wants_trace(devices))
      state.trace(
        random_stream{seed_of(s.internals(), 1, microbatch_id{0})}, [&] {
          whole->rehearse(split(first_batch(x), x.smp.microbatches, 0, 0));
        });
    auto decision = state.decide(
      static_cast<uint32_t>(devices), x.smp.default_partition,
      {x.smp.tensor_parallel_modules, x.smp.tensor_parallel_degree,
       x.smp.optimize == "memory"});
    use(s, state.model(), std::move(decision));
  });
}

printed_plan plan_model(const train_config& x) {
  printed_plan result;
  decide_alone(x, [&](session&, const walked_model& model,
                      const partition_decision& decision) {
    result = {decision.text() + largest_need(model, decision.plan, x),
              plan_json(decision.model, decision.plan), decision.trace_failure};
  });
  return result;
}

} // namespace smp
