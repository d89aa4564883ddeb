#include "runtime/placement/partitioning.hpp"

#include "actors/server/microbatch_sequencer.hpp"
#include "partition/partition_stability.hpp"
#include "partition/print.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/device/moved_tensors.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/intercept/hooks.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/module_list.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/model/traced_code.hpp"
#include "runtime/optimizer/optimizer_check.hpp"
#include "runtime/placement/model_description.hpp"
#include "runtime/placement/module_times.hpp"
#include "runtime/sharing/sharing_costs.hpp"
#include "runtime/sharing/sharing_explanations.hpp"
#include "tp/tensor_group.hpp"
#include "transport/container_bytes.hpp"
#include "transport/exchange.hpp"

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <iterator>
#include <set>

namespace smp {

// -- messages -----------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, work& x) {
  return f.object(x).fields(
    f.field("device", x.device), f.field("forward", x.forward),
    f.field("backward", x.backward), f.field("activations", x.activations),
    f.field("ordered", x.ordered), f.field("chunk", x.chunk),
    f.field("waits", x.waits));
}

template <class Inspector>
bool inspect(Inspector& f, pipeline_program& x) {
  return f.object(x).fields(
    f.field("devices", x.devices), f.field("chunks", x.chunks),
    f.field("hop_seconds", x.hop_seconds), f.field("chain", x.chain));
}

/// The placement of modules that rank 0 decided.
struct placement_message {
  std::string text;
  std::vector<uint32_t> module_device;
  pipeline_program program;
  std::vector<shared_module> shared;
  std::vector<cut_parameter> cut;
  std::vector<checkpointing_choice> checkpointed;
  std::set<uint32_t> changing;              // parameters
  std::map<uint32_t, std::string> stateful; // as the trace found
};

template <class Inspector>
bool inspect(Inspector& f, placement_message& x) {
  return f.object(x).fields(
    f.field("text", x.text), f.field("module_device", x.module_device),
    f.field("program", x.program), f.field("shared", x.shared),
    f.field("cut", x.cut), f.field("checkpointed", x.checkpointed),
    f.field("changing", x.changing), f.field("stateful", x.stateful));
}

/// Lets ranks detect that they hold different models.
struct model_outline {
  uint64_t hash = 0;
  uint64_t modules = 0;
  uint64_t tensors = 0;
  /// Modules marked by `set_stateful`: a rank that orders them awaits others.
  std::set<uint32_t> stateful;
};

template <class Inspector>
bool inspect(Inspector& f, model_outline& x) {
  return f.object(x).fields(
    f.field("hash", x.hash), f.field("modules", x.modules),
    f.field("tensors", x.tensors), f.field("stateful", x.stateful));
}

namespace {

/// Relative spread of the measured times of one module on a machine that does
/// nothing else.
constexpr double time_error = 0.02;

/// Tells whether module times are needed and must be measured.
bool measures_times(const session_config& x) {
  return x.auto_partition && x.times.empty();
}

std::string why_guessed(bool traced_before, const session_config& x,
                        bool deferred) {
  return traced_before              ? "modules were added"
         : x.trace_device == "none" ? "smp.trace_device is none"
         : deferred                 ? "parameters have no values yet"
                                    : "partitioned before the first step";
}

/// Gives the modules the times from a file.
program_times use_times(const module_times& x, model_info& model) {
  apply_times(x, model);
  double forward = 0;
  for (auto& m : model)
    forward += m.compute.value_or(0);
  return {(1 + x.backward_ratio) * forward, x.backward_ratio, x.hop_seconds};
}

} // namespace

walked_model walk_hooked(const model_root& x) {
  if (x.script)
    return walk(x.script);
  auto result = walk(*x.module);
  install_hooks(result);
  return result;
}

std::string partition_decision::text(bool all) const {
  auto result = print_partition(model, plan, {.colour = true});
  for (auto* remarks : {&sharing.remarks, &checkpointing.remarks})
    for (auto& line : remarks->lines(all))
      result += line + "\n";
  return result;
}

partitioning::partitioning(const rank_context& rank, const module_marks& marks,
                           const model_root& root, model_map& map)
  : rank_(rank), marks_(marks), root_(root), map_(map) {
  // nop
}

void partitioning::rewalk() {
  map_.replace(walk_hooked(root_), marks_.stateful);
}

bool partitioning::any_deferred() const {
  auto& tensors = map_.model().tensors;
  return std::any_of(tensors.begin(), tensors.end(),
                     [](auto& x) { return is_deferred(x.tensor); });
}

bool partitioning::wants_trace(uint64_t devices) const {
  return rank_.config().auto_partition && can_trace(devices);
}

bool partitioning::can_trace(uint64_t devices) const {
  // One rank alone may not have room for deferred parameters.
  return rank_.config().trace_device != "none" && devices > 1
         && !any_deferred();
}

namespace {

/// While one rank traces: no parameter is cut yet, and the peers do not trace.
struct without_peers {
  without_peers() = default;

  ~without_peers() {
    tensor_group::set_current(before);
  }

  without_peers(const without_peers&) = delete;
  without_peers& operator=(const without_peers&) = delete;

  tensor_group* before = tensor_group::set_current(&tensor_group::lone());
};

} // namespace

void partitioning::trace(const std::function<void()>& prepare,
                         random_stream stream,
                         const std::function<void()>& body) {
  auto& cfg = rank_.config();
  rewalk();
  auto& modules = map_.model().modules;
  for (size_t i = 0; i < modules.size(); ++i)
    for (auto* hook : modules[i].hooks)
      hook->id = module_id{i};
  traced_hash_ = map_.model().hash();
  without_peers alone;
  try {
    prepare();
    trace_ = trace_forward(
      map_.model(),
      {.gpu = cfg.trace_device == "gpu"
              || (cfg.trace_device == "auto" && !rank_.device().is_cpu()),
       .device = rank_.device(),
       .times = measures_times(cfg),
       .memory = cfg.auto_partition},
      std::move(stream), body);
  } catch (const error& err) {
    // All ranks must learn of it: they wait for the decision.
    trace_failure_ = err.cause();
  }
}

namespace {

std::set<uint32_t> stateful_modules(const walked_model& model,
                                    const module_marks& marks) {
  std::set<uint32_t> result;
  for (uint32_t i = 0; i < model.modules.size(); ++i)
    if (marks.stateful.contains(model.modules[i].identity()))
      result.insert(i);
  return result;
}

/// @param mine marks of rank `self`
/// @param other marks of rank `from`
/// @throws error (config) naming a module that only one of them marked
void check_same_marks(const walked_model& model, const std::set<uint32_t>& mine,
                      rank_id self, const std::set<uint32_t>& other,
                      rank_id from) {
  std::vector<uint32_t> differ;
  std::ranges::set_symmetric_difference(mine, other,
                                        std::back_inserter(differ));
  if (differ.empty())
    return;
  auto is_mine = mine.contains(differ.front());
  auto& name = model.modules[differ.front()].names.front();
  throw config_error(fmt::format(
    "smp::set_stateful was called for {} on rank {}, but not on rank {}; all "
    "ranks must call it for the same modules",
    name.empty() ? "the whole model" : "module '" + name + "'",
    (is_mine ? self : from).value, (is_mine ? from : self).value));
}

} // namespace

void partitioning::check_same_everywhere() {
  auto& model = map_.model();
  model_outline mine{model.hash(), model.modules.size(), model.tensors.size(),
                     stateful_modules(model, marks_)};
  auto world = world_of(rank_);
  auto all = rank_.exchange().all_gather(world, "smp.model", to_payload(mine));
  for (size_t i = 0; i < all.size(); ++i) {
    auto other = from_payload<model_outline>(all[i], "outline of a model");
    if (other.hash != mine.hash)
      throw error{error_code::config,
                  "rank " + std::to_string(world[i].value)
                    + " has another model than rank "
                    + std::to_string(rank_.self().value) + ": "
                    + std::to_string(other.modules) + " modules and "
                    + std::to_string(other.tensors) + " tensors against "
                    + std::to_string(mine.modules) + " and "
                    + std::to_string(mine.tensors)
                    + ", or other names, types or shapes; all ranks must "
                      "build the same model"};
    check_same_marks(model, mine.stateful, rank_.self(), other.stateful,
                     world[i]);
  }
}

namespace {

/// Each tensor-parallel rank holds a part of a shared module, the first rank
/// the largest; modules below a shared one are not counted by themselves.
void weigh_slices(const walked_model& model, const sharing_decision& x,
                  uint64_t peers, model_info& info) {
  for (auto& shared : x.shared) {
    auto slices = slices_of(model, shared, 0, static_cast<int64_t>(peers));
    for (auto i : model.subtree(static_cast<uint32_t>(shared.id.value))) {
      for (auto& y : info[i].parameters)
        if (auto found = slices.find(static_cast<uint32_t>(y.id));
            found != slices.end()) {
          auto& slice = found->second;
          y.elements = y.elements
                       * static_cast<uint64_t>(slice.length * slice.blocks)
                       / static_cast<uint64_t>(
                         slice.whole.at(static_cast<size_t>(slice.dim)));
        }
      if (i != shared.id.value)
        info[i].part_of = "'" + info[shared.id.value].path
                          + "', which ranks share as a whole";
    }
  }
  for (auto& cut : x.cut)
    for (auto& y : info[model.tensors[cut.tensor].modules.front()].parameters)
      if (y.id == cut.tensor)
        y.elements /= peers;
}

void check_same_samples(const sharing_request& x,
                        const sharing_decision& found) {
  if (x.prescaled && found.shared.empty() && found.cut.empty())
    throw config_error(
      "smp.prescaled_batch: no module is shared, so ranks with the same "
      "samples would all compute the same; name some in "
      "tensor_parallel.modules, or leave it out");
}

sharing_decision find_shared(const walked_model& model,
                             const module_marks& marks,
                             const sharing_request& x) {
  if (x.peers == 1)
    return {};
  auto result = decide_sharing(model, marks.sharing, x);
  decide_cuts(model, marks.cuts, x.peers, result);
  explain_unknown(model, marks.sharing, x, result);
  check_same_samples(x, result);
  return result;
}

partition_options options_of(const session_config& x, uint32_t devices,
                             uint64_t default_device) {
  partition_options result;
  result.manual.devices = devices;
  result.manual.automatic = x.auto_partition;
  result.manual.default_device = static_cast<uint32_t>(default_device);
  result.memory_weight = effective_memory_weight(x);
  result.strategy = parse_partition_strategy(x.strategy);
  result.chunks = static_cast<uint32_t>(x.chunks);
  return result;
}

std::set<uint32_t> changed_parameters(const walked_model& model,
                                      const trace_result& x) {
  auto result = x.changed;
  std::erase_if(result, [&](auto t) { return model.tensors[t].is_buffer; });
  return result;
}

/// Marks the modules whose calls always wait, as far as known: those that the
/// user named, and those that keep state.
/// @param trace null: there is none
void find_waiting(const model_map& map, const std::vector<std::string>& named,
                  const trace_result* trace, model_info& info) {
  const module_list waiting{map.model(), named};
  for (uint32_t i = 0; i < info.size(); ++i)
    if (waiting.contains(i))
      info[i].waited_for = true;
  for (auto x : map.order().unseen())
    info[x.value].keeps_state = true;
  if (trace)
    for (auto tensor : trace->changed)
      for (auto x : map.order().guards(tensor))
        info[x.value].keeps_state = true;
}

/// Sets the cost of crossing ranks, if times are known.
void price_crossings(partition_options& x) {
  x.crossing = communication::from_times(x.step_seconds);
  // Measured times have errors, and a detour also costs a microbatch turns in
  // the queues of both ranks: a module moves to another rank only if that gains
  // at least a tenth of what the last device gains.
  auto n = static_cast<double>(x.manual.devices);
  if (x.manual.devices > 1)
    x.crossing.request = std::max(x.crossing.request, 0.1 / (n * (n - 1)));
}

/// Adds a remark if slightly different times would change the decision.
void add_doubt(const model_info& info, const partition_plan& plan,
               std::vector<std::string>& remarks) {
  if (auto n = undecided_modules(info, plan, time_error); n > 0)
    remarks.push_back("the decision depends on noise: with times 2 % off, "
                      + std::to_string(n) + (n == 1 ? " module" : " modules")
                      + " would be elsewhere, at about the same step time; "
                        "smp.manual_partition keeps this placement");
}

} // namespace

partition_decision partitioning::decide(uint32_t devices,
                                        uint64_t default_device,
                                        const sharing_request& sharing) const {
  if (trace_failure_)
    throw error{trace_failure_};
  auto& cfg = rank_.config();
  auto options = options_of(cfg, devices, default_device);
  auto traced = trace_ && traced_hash_ == map_.model().hash();
  if (traced)
    keep_order_of(*trace_);
  auto info = describe(map_.model(), marks_.pins, map_.order());
  auto shared = find_shared(map_.model(), marks_, sharing);
  weigh_slices(map_.model(), shared, sharing.peers, info);
  std::vector<std::string> remarks;
  auto timed = traced && trace_->times && !is_noise(*trace_);
  shared_traffic sent;
  find_waiting(map_, cfg.no_promises, traced ? &*trace_ : nullptr, info);
  if (traced) {
    apply_trace(info, *trace_, element_bytes(map_.model()));
    const auto whole = step_seconds(info, *trace_);
    const auto measured = trace_->times || trace_->memory;
    if (measured)
      options.basis = describe_trace(*trace_, whole);
    if (sharing.prescaled)
      weigh_parts(map_.model(), shared, sharing, timed, info);
    sent = find_traffic(map_.model(), sharing, *trace_, shared);
    if (timed)
      options.basis += weigh_traffic(sent, info);
    options.step_seconds = step_seconds(info, *trace_);
    if (measured)
      remarks = explain_trace(info, *trace_);
  } else if (cfg.auto_partition && devices > 1) {
    options.basis = "guessed from sizes: "
                    + why_guessed(trace_.has_value(), cfg, any_deferred());
  }
  program_times times;
  if (!cfg.times.empty()) {
    times = use_times(read_module_times(cfg.times), info);
    options.step_seconds = times.step_seconds;
    options.basis += (options.basis.empty() ? "" : "; ")
                     + ("times of " + cfg.times);
  } else if (options.step_seconds > 0) {
    times.step_seconds = options.step_seconds;
  }
  if (options.step_seconds > 0)
    price_crossings(options);
  auto plan = make_partition(info, options);
  if (timed && devices > 1)
    add_doubt(info, plan, remarks);
  plan.reasons.insert(plan.reasons.begin(), remarks.begin(), remarks.end());
  if (auto text = warning_of_nothing_shared(sharing, shared); !text.empty())
    plan.warnings.push_back(text);
  if (auto text = warning_of_evaluation(map_.model()); !text.empty())
    plan.warnings.push_back(text);
  describe_parts(map_.model(), sharing, sent, shared);
  return {
    std::move(info), std::move(plan), trace_ ? trace_->failure : std::string{},
    traced,          times,           std::move(shared),
    checkpointed()};
}

checkpointing_decision partitioning::checkpointed() const {
  auto& x = rank_.config().activation_checkpointing;
  auto result = decide_checkpointing(
    map_.model(),
    {marks_.checkpointing, x.modules, {x.strategy, x.preserve_rng_state}},
    marks_.stateful);
  if (rank_.config().offload_activations && result.chosen.empty())
    throw config_error(
      "smp.offload_activations has no effect: no module's activations are "
      "checkpointed; name some in activation_checkpointing.modules, or by "
      "smp::set_activation_checkpointing");
  return result;
}

void partitioning::keep_order_of(const trace_result& x) const {
  map_.order().order_again(changed_parameters(map_.model(), x));
  declare(x.stateful);
}

void partitioning::declare(const std::map<uint32_t, std::string>& xs) const {
  for (auto& [module, why] : xs)
    map_.order().declare(module, why);
}

void partitioning::place() {
  check_same_everywhere();
  refuse_complex_parameters(map_.model());
  auto& pipeline = rank_.pipeline();
  // Replicas that measured separately would cut differently.
  auto found = agree_everywhere(rank_, "smp.partition", [&] {
    auto sharing = sharing_wanted(rank_.config());
    sharing.explains_all = true;
    decision_ = decide(static_cast<uint32_t>(pipeline.size()),
                       rank_.config().default_partition, sharing);
    if (on_decision_)
      on_decision_(*decision_);
    return placement_message{
      decision_->text(),
      decision_->plan.module_device,
      make_program(decision_->model, decision_->plan, decision_->times),
      decision_->sharing.shared,
      decision_->sharing.cut,
      decision_->checkpointing.chosen,
      map_.order().changing_parameters(),
      trace_ ? trace_->stateful : std::map<uint32_t, std::string>{}};
  });
  text_ = std::move(found.text);
  program_ = std::move(found.program);
  std::vector<rank_id> owners(map_.model().modules.size());
  for (size_t i = 0; i < owners.size(); ++i)
    owners[i] = pipeline.at(found.module_device.at(i));
  map_.recompute(regions_of(map_.model(), found.checkpointed, owners));
  map_.place(std::move(owners));
  declare(found.stateful);
  map_.order_again(found.changing);
  shared_ = std::move(found.shared);
  std::vector<module_id> together;
  for (auto& x : shared_)
    together.push_back(x.id);
  map_.share(together);
  cut_ = std::move(found.cut);
  std::vector<uint32_t> tensors;
  for (auto& x : cut_)
    tensors.push_back(x.tensor);
  map_.compute_together(tensors);
  auto& modules = map_.model().modules;
  for (size_t i = 0; i < modules.size(); ++i) {
    auto& m = modules[i];
    for (auto* hook : m.hooks) {
      hook->id = module_id{i};
      hook->owner = map_.owner(module_id{i});
      hook->region = hook->owner == rank_.self()
                       ? map_.recomputed(module_id{i}).region
                       : 0;
      hook->local = hook->owner == rank_.self() && hook->region == 0;
    }
    if (auto* seq = dynamic_cast<torch::nn::SequentialImpl*>(m.object))
      name_sequential(*seq, module_id{i}, rank_.model());
  }
  set_order();
}

void partitioning::set_order() {
  auto& modules = map_.model().modules;
  for (uint32_t i = 0; i < modules.size(); ++i)
    for (auto* hook : modules[i].hooks) {
      hook->ordered = map_.keeps_order(module_id{i});
      hook->stream = map_.stream_of(module_id{i});
    }
  if (!map_.overlaps())
    return;
  auto& order = map_.order();
  rank_.sequencer().set_modules(order.modules(), order.unseen(),
                                order.serial());
}

namespace {

/// Lack of memory as the user can judge it.
/// @pre the rank has a device
error no_room(const rank_context& rank, const model_map& map,
              const c10::OutOfMemoryError& why) {
  constexpr double mb = 1e6;
  double parameters = 0, buffers = 0;
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (map.owned(i))
      (tensors[i].is_buffer ? buffers : parameters) += static_cast<double>(
        tensors[i].tensor.nbytes());
  auto there = rank.launches()->look_at_memory();
  return error{failure{
    error_code::user_code, rank.self(), "",
    fmt::format(
      "{}, while the rank moved its part of the model to {}: {:.1f} MB of "
      "parameters and {:.1f} MB of buffers; tensors of this process hold "
      "{:.1f} of the device's {:.1f} MB; what helps is more pipeline ranks, "
      "smp.tensor_parallel_degree, smp.bf16_params, or fewer ranks on a device",
      why.what_without_backtrace(), rank.device().str(), parameters / mb,
      buffers / mb, static_cast<double>(there.now) / mb,
      static_cast<double>(there.total) / mb)}};
}

} // namespace

void partitioning::release(remote_parameters& others) {
  auto& tensors = map_.model().tensors;
  std::vector<at::Tensor> mine;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (map_.owned(i))
      mine.push_back(tensors[i].tensor);
    else
      others.replace(i);
  // Now that there is room: at most one tensor that is shared with this rank is
  // whole at a time.
  auto& layout = rank_.layout();
  for (auto& shared : shared_)
    share_module(
      map_, shared,
      static_cast<int64_t>(layout.rank(comm_group::tp, rank_.self())),
      sharing_wanted(rank_.config()));
  for (auto& x : cut_)
    cut_parameter_of(
      map_, x, static_cast<int64_t>(layout.rank(comm_group::tp, rank_.self())),
      static_cast<int64_t>(layout.size(comm_group::tp)));
  initialise_deferred(mine);
  try {
    move_in_place(std::move(mine), rank_.device());
  } catch (const c10::OutOfMemoryError& err) {
    throw no_room(rank_, map_, err);
  }
  if (auto* launches = rank_.launches())
    launches->look_at_memory();
  map_.finish_partition();
}

} // namespace smp
