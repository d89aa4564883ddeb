#include "runtime/plan/planner.hpp"

#include "partition/schedule/program.hpp"
#include "runtime/checkpoint/load_state_dict.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/device/cuda_driver.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/placement/partition_json.hpp"
#include "runtime/plan/assumed_peers.hpp"
#include "runtime/plan/kept_activations.hpp"
#include "runtime/process/control_group.hpp"
#include "runtime/process/cores.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/sharing/sharing.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/step/schedule_policies.hpp"
#include "runtime/step/split.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

namespace smp {

namespace {

double mb_of(uint64_t bytes) {
  return 1e-6 * static_cast<double>(bytes);
}

/// @param peers that share modules
std::string explain(const activation_need& need, uint64_t peers) {
  if (!need.unknown.empty())
    return "  activations come on top, which nobody knows here: " + need.unknown
           + "\n";
  std::string most;
  for (auto bytes : need.bound)
    most += fmt::format("{}{:.2f}", most.empty() ? "" : ", ", mb_of(bytes));
  auto as_told = need.bound == need.predicted
                   ? std::string{}
                   : " in the schedule as predicted, with other timing up to "
                       + most;
  std::string estimated;
  if (peers > 1)
    estimated
      = "; of modules that ranks share estimated, as if all ranks had "
        "the samples of the first";
  return "  activations: kept for backward" + as_told + estimated
         + "; what operations use while they run comes on top\n";
}

/// Whether ranks compute on devices, as far as this machine tells.
bool has_devices(const session_config& x) {
  if (x.device == "cpu")
    return false;
  return x.device != "auto" || ask_cuda_driver().problem.empty();
}

/// Of all ranks, in bytes.
struct total_need {
  uint64_t where_they_compute = 0;
  /// In host memory, if they compute on devices.
  uint64_t on_host = 0;
};

std::string warn_of_limit(const total_need& x, const session_config& config,
                          const control_group& here) {
  auto exceeds = [&](uint64_t bytes) {
    return here.memory && bytes > *here.memory;
  };
  // A driver takes a while to answer.
  if (!exceeds(std::max(x.where_they_compute, x.on_host)))
    return {};
  auto need = has_devices(config) ? x.on_host : x.where_they_compute;
  if (!exceeds(need))
    return {};
  return fmt::format(
    "  warning: all ranks together need {:.0f} MB or more, and the control "
    "group (container, batch job) here may use {:.0f} MB: on this machine "
    "alone the kernel would kill some\n",
    mb_of(need), mb_of(*here.memory));
}

/// While it lives, tensor operations use as many threads as one rank gets if
/// all ranks run on this machine.
class threads_of_a_rank {
public:
  explicit threads_of_a_rank(const train_config& config)
    : before_(at::get_num_threads()) {
    auto ranks = ranks_of(config);
    auto share = std::max<uint64_t>(1, usable_cores().size() / ranks);
    share = std::min(
      share, share_of_cpus(read_control_group(), ranks).value_or(share));
    at::set_num_threads(
      static_cast<int>(config.smp.threads > 0 ? config.smp.threads : share));
  }

  ~threads_of_a_rank() {
    at::set_num_threads(before_);
  }

  threads_of_a_rank(const threads_of_a_rank&) = delete;
  threads_of_a_rank& operator=(const threads_of_a_rank&) = delete;

private:
  int before_;
};

/// The first replica's part of the first batch.
batch first_batch(const train_config& x) {
  auto n = replicas_of(x);
  return make_data(x, n)->training_batch(0, {0, n});
}

/// @returns by position of the tensor: bytes that the first of the ranks holds
/// of what they share
std::map<uint32_t, uint64_t> shared_parts(const walked_model& model,
                                          const sharing_decision& sharing,
                                          int64_t peers) {
  std::map<uint32_t, uint64_t> result;
  auto add = [&](uint32_t tensor, const tensor_slice& slice) {
    auto& whole = model.tensors[tensor].tensor;
    result[tensor] = whole.nbytes()
                     * static_cast<uint64_t>(slice.length * slice.blocks)
                     / static_cast<uint64_t>(whole.size(slice.dim));
  };
  for (auto& shared : sharing.shared)
    for (auto& [tensor, slice] : slices_of(model, shared, 0, peers))
      add(tensor, slice);
  for (auto& cut : sharing.cut) {
    auto& whole = model.tensors[cut.tensor].tensor;
    add(cut.tensor, {cut.dim, 0, whole.size(cut.dim) / peers});
  }
  return result;
}

} // namespace

std::string needs_text(const std::vector<memory_need>& needs,
                       const activation_need& activations,
                       const train_config& config, const control_group& here) {
  std::vector<std::optional<uint64_t>> kept(needs.size());
  if (activations.unknown.empty())
    kept.assign(activations.predicted.begin(), activations.predicted.end());
  total_need all;
  for (size_t device = 0; device < needs.size(); ++device) {
    all.where_they_compute += needs[device].sum() + kept[device].value_or(0);
    all.on_host += needs[device].on_host;
  }
  // That was one replica, of one of the ranks that share modules.
  for (auto* x : {&all.where_they_compute, &all.on_host})
    *x = *x * ranks_of(config) / needs.size();
  return needs_table(needs, config.optimizer, kept)
         + explain(activations, config.smp.tensor_parallel_degree)
         + warn_of_limit(all, config.smp, here);
}

printed_plan plan_tree(const std::string& path, partition_options options) {
  auto tree = parse_partition_tree(read_text(path), path);
  options.crossing = tree.crossing();
  auto plan = make_partition(tree.model, options);
  return {print_partition(tree.model, plan, {.colour = true}),
          decision_json(plan)};
}

std::vector<memory_need> needs_of(const walked_model& model,
                                  const partition_decision& decision,
                                  const train_config& config) {
  const auto parts = shared_parts(
    model, decision.sharing,
    static_cast<int64_t>(config.smp.tensor_parallel_degree));
  const auto offloads = config.smp.offload_optimizer && has_devices(config.smp);
  std::vector<memory_need> result;
  for (uint64_t device = 0; device < config.smp.pipeline_parallel_degree;
       ++device) {
    auto held = [&](uint32_t tensor) -> held_part {
      auto& walked = model.tensors[tensor];
      if (decision.plan.module_device[walked.modules.front()] != device)
        return {};
      if (auto part = parts.find(tensor); part != parts.end())
        return {part->second, true};
      return {walked.tensor.nbytes(), false};
    };
    result.push_back(need_of(model, config, held, offloads));
  }
  return result;
}

void fail_on_microbatch(const train_config& x, const std::string& which,
                        const std::string& why) {
  throw error{error_code::user_code,
              fmt::format("{} fails on the first {}: {}", name_of_model(x),
                          which, why.substr(0, why.find('\n')))};
}

void try_first_microbatch(const train_config& config, const std::string& why) {
  auto whole = make_trainable(config);
  auto arguments = split(first_batch(config), config.smp.microbatches, 0, 0);
  try {
    whole->loss(arguments);
  } catch (const error&) {
    throw;
  } catch (...) {
    fail_on_microbatch(config, "microbatch", why);
  }
}

const walked_model& lone_decision::model() const {
  return state.model();
}

namespace {

/// @returns why activations cannot be measured; empty if they can
std::string why_not_measured(const lone_decision& run,
                             const train_config& config) {
  auto is_absent = [](const walked_tensor& tensor) {
    return is_deferred(tensor.tensor);
  };
  if (config.smp.trace_device == "none")
    return "smp.trace_device is none";
  if (!run.decision.trace_failure.empty())
    return run.decision.trace_failure;
  if (std::ranges::any_of(run.model().tensors, is_absent))
    return "parameters have no values yet";
  return {};
}

schedule_report play(const lone_decision& run, const train_config& x,
                     const model_info& info) {
  auto program = make_program(info, run.decision.plan, run.decision.times);
  return run.of.internals().policies().play(program, x.smp.microbatches, false);
}

/// @param bytes by module, of one microbatch
/// @returns by device, the peak over the microbatches of the schedule
std::vector<uint64_t> as_played(const lone_decision& run,
                                const train_config& config,
                                const std::vector<uint64_t>& bytes) {
  auto info = run.decision.model;
  for (size_t module = 0; module < info.size(); ++module)
    info[module].activations = static_cast<double>(bytes[module]);
  auto report = play(run, config, info);
  std::vector<uint64_t> result;
  for (auto peak : report.peak_activations)
    result.push_back(static_cast<uint64_t>(peak));
  return result;
}

/// The same with the largest number of microbatches in flight everywhere.
std::vector<uint64_t> at_most(const lone_decision& run, const train_config& x,
                              const std::vector<uint64_t>& bytes) {
  auto live = std::min(effective_active_microbatches(x.smp, x.smp.microbatches),
                       x.smp.microbatches);
  std::vector<uint64_t> result(x.smp.pipeline_parallel_degree);
  for (size_t i = 0; i < bytes.size(); ++i)
    result.at(run.decision.plan.module_device[i]) += live * bytes[i];
  return result;
}

/// @param count turns bytes of one microbatch into peaks by device
template <class F>
std::vector<uint64_t> peaks_of(const train_config& config,
                               const kept_activations& kept, F count) {
  auto result = count(kept.saved);
  auto arguments = count(kept.arguments);
  for (size_t device = 0; device < result.size(); ++device) {
    // Arguments on their way to the file, and back.
    if (config.smp.offload_activations)
      arguments[device] = std::min(arguments[device],
                                   2 * config.smp.activation_loading_horizon
                                     * kept.largest_call[device]);
    result[device] += arguments[device] + kept.computed_again[device];
  }
  return result;
}

random_stream first_stream(session& s) {
  return random_stream{seed_of(s.internals(), 1, microbatch_id{0})};
}

/// While it lives, modules run as on the first of the ranks that share them, in
/// this process alone.
class with_assumed_peers {
public:
  with_assumed_peers(lone_decision& run, const session_config& x)
    : peers_(x.tensor_parallel_degree, x.prescaled_batch),
      sharing_(
        run.state.rehearse_sharing(run.decision.sharing, sharing_wanted(x))),
      before_(tensor_group::set_current(&peers_)) {
    // nop
  }

  ~with_assumed_peers() {
    tensor_group::set_current(before_);
  }

  with_assumed_peers(const with_assumed_peers&) = delete;
  with_assumed_peers& operator=(const with_assumed_peers&) = delete;

private:
  assumed_peers peers_;
  sharing_rehearsal sharing_;
  tensor_group* before_;
};

/// @pre why_not_measured(run, config).empty()
activation_need measure(lone_decision& run, const train_config& config) {
  std::optional<kept_activations> kept;
  activation_need result{.unknown = "the forward phase did not end"};
  // In a trace, so that parameters, buffers and streams stay what they are.
  run.state.trace(first_stream(run.of), [&] {
    try {
      auto arguments = split(first_batch(config), config.smp.microbatches, 0,
                             0);
      std::optional<with_assumed_peers> peers;
      if (config.smp.tensor_parallel_degree > 1)
        peers.emplace(run, config.smp);
      kept = measure_kept(run.model(), run.decision, arguments,
                          [&] { return run.whole.loss(arguments); });
      result.unknown.clear();
    } catch (const error& failed) {
      result.unknown = failed.what();
    } catch (const c10::Error& failed) {
      result.unknown = failed.what_without_backtrace();
    } catch (const std::exception& failed) {
      result.unknown = failed.what();
    }
  });
  result.unknown.resize(
    std::min(result.unknown.size(), result.unknown.find('\n')));
  if (!kept)
    return result;
  result.predicted = peaks_of(
    config, *kept, [&](auto& bytes) { return as_played(run, config, bytes); });
  result.bound = peaks_of(
    config, *kept, [&](auto& bytes) { return at_most(run, config, bytes); });
  return result;
}

/// Whether the first device will have to hold, for all its microbatches, as
/// much as one microbatch takes of the whole model.
bool has_room(const lone_decision& run, const train_config& config) {
  uint64_t whole = 0;
  for (auto& walked : run.model().tensors)
    if (walked.tensor.defined())
      whole += walked.tensor.nbytes();
  // While measuring, the ranks' parts exist besides the whole modules.
  const auto parts = shared_parts(
    run.model(), run.decision.sharing,
    static_cast<int64_t>(config.smp.tensor_parallel_degree));
  for (auto& [tensor, bytes] : parts)
    whole += bytes;
  return run.decision.checkpointing.chosen.empty()
         && whole <= needs_of(run.model(), run.decision, config).front().sum()
         && play(run, config, run.decision.model).peak_live.front()
              >= config.smp.pipeline_parallel_degree;
}

/// @returns why the first held-out microbatch fails in evaluation mode: code
/// that no training step runs. Empty: it does not, or cannot be tried here
std::string failed_evaluation(lone_decision& run, const train_config& config) {
  std::string result;
  if (config.train.eval_steps == 0 || !why_not_measured(run, config).empty())
    return result;
  auto replicas = replicas_of(config);
  auto data = make_data(config, replicas);
  if (!data->has_held_out())
    return result;
  run.whole.train(false);
  // In a trace, so that parameters, buffers and streams stay what they are.
  run.state.trace(first_stream(run.of), [&] {
    at::NoGradGuard no_grad;
    try {
      run.whole.loss(
        split(data->held_out_batch(0, config.train.eval_steps, {0, replicas}),
              config.smp.microbatches, 0, 0));
    } catch (const c10::Error& failed) {
      result = failed.what_without_backtrace();
    } catch (const std::exception& failed) {
      result = failed.what();
    }
  });
  run.whole.train(true);
  return result;
}

} // namespace

activation_need activations_of(lone_decision& run, const train_config& x) {
  activation_need unknown{.unknown = why_not_measured(run, x)};
  return unknown.unknown.empty() ? measure(run, x) : unknown;
}

activation_need activations_at_start(lone_decision& run,
                                     const train_config& config) {
  activation_need unknown{.unknown = why_not_measured(run, config)};
  if (!unknown.unknown.empty())
    return unknown;
  try {
    // Only smp's own models surely have no state that a trace cannot restore.
    const bool stays = config.model.type != "plugin" || run.decision.traced;
    // A run consults the user's own schedule in steps only.
    if (config.smp.pipeline != "actor" && config.model.type != "torchscript"
        && stays && has_room(run, config))
      return measure(run, config);
    unknown.unknown = "smp-train check measures them";
  } catch (const error& failed) {
    unknown.unknown = failed.what();
  }
  return unknown;
}

namespace {

/// Makes it as rank 0 of a run does: without a trace only sizes matter.
std::unique_ptr<trainable> make_whole(const train_config& x) {
  delay_param_initialization deferring{defers_parameters(x, 0)};
  return make_trainable(x);
}

/// Whether the arguments of modules show how much the ranks that share them
/// exchange.
bool counts_exchanges(const model_state& state, const train_config& x) {
  return x.smp.tensor_parallel_degree > 1 && x.smp.trace_device != "none"
         && std::ranges::none_of(state.model().tensors,
                                 [](auto& t) { return is_deferred(t.tensor); });
}

} // namespace

void decide_alone(const train_config& config,
                  const std::function<void(lone_decision&)>& use) {
  const auto devices = config.smp.pipeline_parallel_degree;
  virtual_world_options world;
  world.config = config.smp;
  world.config.active_microbatches = effective_active_microbatches(
    config.smp, config.smp.microbatches);
  world.config.pipeline_parallel_degree = 1;
  world.config.fast_mode = takes_promises(config.smp);
  world.config.ddp = false;
  world.config.default_partition = 0; // the other devices are not ranks
  world.config = without_idle_keys(std::move(world.config));
  threads_of_a_rank threads{config};
  run_virtual_world(1, world, [&](session& s) {
    auto whole = make_whole(config);
    auto data = make_data(config, replicas_of(config));
    auto model = whole->distribute();
    begin_run(config, *whole, *data, *model);
    if (!config.train.init_from.empty())
      check_state_dict(config.train.init_from, *model,
                       config.train.init_prefix);
    auto& state = model->state();
    auto wanted = config.smp.auto_partition ? state.wants_trace(devices)
                                            : state.can_trace(devices);
    if (wanted || counts_exchanges(state, config))
      state.trace(first_stream(s), [&] {
        whole->rehearse(
          split(first_batch(config), config.smp.microbatches, 0, 0));
      });
    register_classes(config.smp);
    auto sharing = sharing_wanted(config.smp);
    sharing.explains_all = true;
    lone_decision decided{s, state, *whole,
                          state.decide(static_cast<uint32_t>(devices),
                                       config.smp.default_partition, sharing)};
    use(decided);
  });
}

printed_plan plan_model(const train_config& config, bool all) {
  printed_plan result;
  decide_alone(config, [&](lone_decision& run) {
    auto& decision = run.decision;
    auto needs = needs_of(run.model(), decision, config);
    result = {
      decision.text(all)
        + needs_text(needs, activations_of(run, config), config),
      plan_json(decision.model, decision.plan, decision.sharing.remarks),
      decision.trace_failure, failed_evaluation(run, config)};
  });
  return result;
}

} // namespace smp
