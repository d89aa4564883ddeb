#include "runtime/plan/planner.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/plan/partition_json.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/sharing.hpp"
#include "runtime/session/split.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <thread>

namespace smp {

namespace {

/// A table of what the ranks need at least.
std::string needs_text(const std::vector<memory_need>& xs,
                       const train_config& x) {
  auto mb = [](uint64_t bytes) { return 1e-6 * static_cast<double>(bytes); };
  auto result = fmt::format("{:<12}{:>12}{:>11}{:>18}{:>10}\n", "memory, MB",
                            "parameters", "gradients",
                            "state of " + x.optimizer.type, "sum");
  for (size_t i = 0; i < xs.size(); ++i)
    result += fmt::format("  {:<10}{:>12.2f}{:>11.2f}{:>18.2f}{:>10.2f}\n",
                          fmt::format("device {}", i), mb(xs[i].parameters),
                          mb(xs[i].gradients), mb(xs[i].optimizer),
                          mb(xs[i].sum()));
  return result + "  activations come on top\n";
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

std::vector<memory_need> needs_of(const walked_model& model,
                                  const partition_decision& decision,
                                  const train_config& x) {
  const auto wanted = sharing_wanted(x.smp);
  const auto peers = static_cast<int64_t>(wanted.peers);
  std::map<uint32_t, uint64_t> parts; // bytes
  auto add = [&](uint32_t tensor, const tensor_slice& slice) {
    auto& whole = model.tensors[tensor].tensor;
    parts[tensor] = whole.nbytes()
                    * static_cast<uint64_t>(slice.length * slice.blocks)
                    / static_cast<uint64_t>(whole.size(slice.dim));
  };
  for (auto id : decision.sharing.shared)
    for (auto& [tensor, slice] :
         slices_of(model, id, 0, peers, wanted.saves_memory))
      add(tensor, slice);
  for (auto& cut : decision.sharing.cut) {
    auto& whole = model.tensors[cut.tensor].tensor;
    add(cut.tensor, {cut.dim, 0, whole.size(cut.dim) / peers});
  }
  std::vector<memory_need> result;
  for (uint64_t i = 0; i < x.smp.pipeline_parallel_degree; ++i)
    result.push_back(need_of(model, x, [&](uint32_t tensor) -> held_part {
      auto& t = model.tensors[tensor];
      if (decision.plan.module_device[t.modules.front()] != i)
        return {};
      if (auto part = parts.find(tensor); part != parts.end())
        return {part->second, true};
      return {t.tensor.nbytes(), false};
    }));
  return result;
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
  world.config.prescaled_batch = false;
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
    auto decision = state.decide(static_cast<uint32_t>(devices),
                                 x.smp.default_partition,
                                 sharing_wanted(x.smp));
    use(s, state.model(), std::move(decision));
  });
}

printed_plan plan_model(const train_config& x) {
  printed_plan result;
  decide_alone(x, [&](session&, const walked_model& model,
                      const partition_decision& decision) {
    result = {decision.text() + needs_text(needs_of(model, decision, x), x),
              plan_json(decision.model, decision.plan), decision.trace_failure};
  });
  return result;
}

} // namespace smp
