#include "runtime/session/model_state.hpp"

#include "actors/replay/record_book.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/session/gradient_buckets.hpp"
#include "runtime/session/half_parameters.hpp"
#include "runtime/session/loss_scaler.hpp"
#include "runtime/session/schedule_policies.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace smp {

model_state::model_state(const rank_context& rank, const module_marks& marks,
                         const schedule_policies& policies, model_root root)
  : rank_(rank),
    root_(std::move(root)),
    map_(rank.self(), rank.layout().size(comm_group::mp),
         walk_hooked(root_)),
    promises_(takes_promises(rank.config()), rank.records()),
    parameters_(rank, map_, promises_),
    modules_(context_),
    partitioning_(rank, marks, root_, map_),
    gate_(rank, policies) {
  context_.map = &map_;
  context_.changes = &changes_;
  context_.placeholders = &parameters_;
  context_.parameters = &parameters_;
  context_.promises = &promises_;
  context_.modules = &modules_;
  cast();
}

/// To the type of parameters that the configuration wants.
void model_state::cast() {
  if (auto type = parameter_type(rank_.config()))
    cast_parameters(map_.model(), *type);
}

model_state::~model_state() {
  for (auto& m : map_.model().modules)
    for (auto* hook : m.hooks) {
      hook->local = true;
      hook->region = 0;
      hook->ordered = false;
      hook->stream = 0;
      hook->distributed = nullptr;
    }
}

// -- partition ----------------------------------------------------------------

void model_state::rewrite_script() {
  if (!root_.script || script_)
    return;
  script_ = std::make_unique<script_program>(map_.model(),
                                             rank_.pipeline().size());
  context_.script = &script_->code();
}

void model_state::trace(random_stream stream,
                        const std::function<void()>& body) {
  // Calls of code that was not rewritten would not be seen.
  partitioning_.trace([this] { rewrite_script(); }, std::move(stream), body);
}

partition_decision model_state::decide(uint32_t devices,
                                       uint64_t default_device,
                                       const sharing_request& sharing) {
  promises_.set_waiting(map_, rank_.config().no_promises);
  return partitioning_.decide(devices, default_device, sharing);
}

void model_state::partition() {
  if (ready_)
    return call_hooks();
  auto& cfg = rank_.config();
  if (!map_.partitioned()) {
    partitioning_.rewalk();
    cast(); // modules may have come
    promises_.set_waiting(map_, cfg.no_promises);
    partitioning_.place();
    rewrite_script();
    partitioning_.release(parameters_);
    // Nobody may ask for a module before its owner is ready.
    rank_.exchange().barrier(rank_.pipeline(), "smp.partitioned");
  }
  check_schedule(cfg.microbatches);
  ready_ = true;
  if (rank_.layout().size(comm_group::dp) > 1)
    buckets_ = std::make_unique<gradient_buckets>(rank_, map_);
  text_ = partitioning_.text() + gate_.text();
  call_hooks();
}

std::string model_state::full_text() const {
  auto* decided = decision();
  return ready_ && decided ? decided->text(true) + gate_.text() : text_;
}

/// One that throws is called again at the next try: the model must not train
/// with what that one refused.
void model_state::call_hooks() {
  while (!hooks_.empty()) {
    hooks_.front()();
    hooks_.erase(hooks_.begin());
  }
}

void model_state::on_partition(std::function<void()> f) {
  if (ready_)
    f();
  else
    hooks_.push_back(std::move(f));
}

// -- properties ---------------------------------------------------------------

void model_state::train(bool on) {
  if (root_.script)
    set_training(*root_.script, on);
  else
    root_.module->train(on);
}

bool model_state::is_training() const {
  return root_.script ? smp::is_training(*root_.script)
                      : root_.module->is_training();
}

void model_state::await_updates() const {
  for (auto& x : map_.model().tensors)
    if (x.tensor.defined())
      await_late(x.tensor);
}

uint64_t model_state::trainability() const {
  fnv_hash result;
  for (auto& x : map_.model().tensors)
    result.add(uint64_t{x.tensor.defined() && x.tensor.requires_grad()});
  return result.get();
}

// -- the scale of the loss ----------------------------------------------------

void model_state::scale_loss(const std::shared_ptr<loss_scaler>& x) {
  if (scaler())
    throw error{error_code::unsupported,
                "another optimizer of the model scales the loss; leave "
                "static_loss_scale and dynamic_loss_scale to one of them"};
  scaler_ = x;
}

double model_state::loss_scale() const {
  auto x = scaler();
  return x ? x->value() : 1.0;
}

at::Tensor model_state::gradient(uint32_t tensor) const {
  at::NoGradGuard no_grad;
  auto x = map_.model().tensors[tensor].tensor;
  x = buckets_ ? buckets_->shards().whole(x) : x.grad();
  auto scale = loss_scale();
  if (!x.defined() || scale == 1)
    return x;
  auto wide = c10::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat)
                                                          : x;
  return wide.div(scale);
}

// -- steps --------------------------------------------------------------------

bool model_state::can_take_back() const {
  // What ranks that only share modules may have to take back is a wrong order.
  auto needed = rank_.pipeline().size() > 1
                || (map_.overlaps() && !map_.order().entries().empty());
  return promises_.on() && !rank_.config().fast_mode && needed
         && (root_.script || map_.order().unseen().empty());
}

bool model_state::keeps_changes() const {
  return map_.order().keeps_late_changes() && attributes_.complete();
}

void model_state::keep() {
  if (map_.overlaps())
    map_.order().keep([this](uint32_t tensor) { return map_.owned(tensor); });
  if (!can_take_back())
    return;
  gradients_.keep(map_);
  if (script_)
    attributes_.keep(map_, script_->code());
}

void model_state::take_back() {
  map_.order().put_back();
  gradients_.put_back();
  attributes_.put_back(map_);
}

void model_state::begin_step(bool again) {
  if (auto& order = map_.order(); map_.overlaps() && order.undecided())
    order.before_step([this](uint32_t tensor) { return map_.owned(tensor); });
  promises_.begin_step(trainability(), again);
}

void model_state::order_again(const std::set<uint32_t>& buffers) {
  map_.order().order_again(buffers);
  // What was recorded did not wait for turns.
  rank_.records().outdate();
  partitioning_.set_order();
  promises_.reconsider();
}

void model_state::run_serially(const std::set<module_id>& modules) {
  rank_.sequencer().set_serial(modules);
  // What was recorded overlapped.
  rank_.records().outdate();
}

namespace {

using observation = module_order::observation;

/// Buffers of this rank that changed although no call of a module that they
/// order came through smp: code here calls it past its hook, where nothing
/// keeps microbatches in their order (R20). (Elsewhere such code asks this rank
/// for the buffer, which counts as a call.)
std::set<uint32_t> changed_past_hooks(const rank_context& rank,
                                      const module_order& order,
                                      const observation& mine) {
  auto& sequencer = rank.sequencer();
  auto entered = [&](module_id x) { return sequencer.calls(x) > 0; };
  // Who says that it keeps state may change that of others, too.
  if (rank.counters().microbatches < 2
      || std::ranges::any_of(order.unseen(), entered))
    return {};
  auto result = mine.changed;
  std::erase_if(result, [&](uint32_t tensor) {
    return std::ranges::any_of(order.guards(tensor), entered);
  });
  return result;
}

/// What all ranks saw that end a step together: those of a pipeline, and of all
/// that share modules with it, as none may fail or release a module alone.
/// Collective over them.
/// @throws error (unsupported), the same on all ranks, if state changed where
///         nobody keeps its order
observation gather(const rank_context& rank, const model_map& map,
                   const observation& mine) {
  auto group = rank.layout().members(comm_group::mp, rank.self());
  auto all = rank.exchange().all_gather(
    group, "smp.order",
    to_payload(std::pair{mine, changed_past_hooks(rank, map.order(), mine)}));
  observation result;
  std::optional<failure> first;
  for (size_t i = 0; i < all.size(); ++i) {
    auto [other, past] = from_payload<
      std::pair<observation, std::set<uint32_t>>>(all[i],
                                                  "observation of a step");
    result.changed.merge(other.changed);
    result.trained.merge(other.trained);
    if (first || past.empty())
      continue;
    auto tensor = *past.begin();
    first = failure{
      error_code::unsupported, group[i], map.name(map.home(tensor)),
      "its buffer '" + map.tensor_name(tensor)
        + "' changed, but no call of it came through smp, which could not keep "
          "the microbatches in their order: code calls it past its hook, as "
          "with Impl::forward or through a plain pointer; call it by its "
          "smp::submodule or Sequential, or name who changes it with "
          "smp::set_stateful"};
  }
  if (first)
    throw error{*first};
  return result;
}

} // namespace

void model_state::end_step(bool complete) {
  promises_.end_step();
  parameters_.end_step();
  if (!complete)
    map_.order().put_back();
  if (!complete || !map_.order().undecided() || !map_.overlaps())
    return;
  auto& sequencer = rank_.sequencer();
  auto mine = map_.order().observe([&](uint32_t i) {
    module_id module{i};
    return map_.owner(module) == rank_.self() && sequencer.calls(module) > 0;
  });
  observation all;
  try {
    all = gather(rank_, map_, mine);
  } catch (...) {
    map_.order().put_back();
    throw;
  }
  // What was recorded waited for turns that nobody waits for from now on, and
  // answered that it met state.
  if (map_.order().learn(all))
    rank_.records().outdate();
  partitioning_.set_order();
  promises_.reconsider();
}

} // namespace smp
