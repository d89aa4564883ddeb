#include "runtime/step/model_state.hpp"

#include "actors/order/order_book.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/optimizer/half_parameters.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/step/schedule_policies.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

namespace smp {

model_state::model_state(const rank_context& rank, const module_marks& marks,
                         const schedule_policies& policies, model_root root)
  : rank_(rank),
    root_(std::move(root)),
    map_(rank.self(), rank.layout().size(comm_group::mp), walk_hooked(root_)),
    promises_(takes_promises(rank.config()), rank.records()),
    parameters_(rank, map_, promises_),
    modules_(context_),
    partitioning_(rank, marks, root_, map_),
    order_learning_(rank, map_),
    gate_(rank, policies) {
  context_.map = &map_;
  context_.changes = &changes_;
  context_.placeholders = &parameters_;
  context_.parameters = &parameters_;
  context_.promises = &promises_;
  context_.modules = &modules_;
  cast();
}

/// Casts to the parameter type that the configuration requests.
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
  // Calls in code that was not rewritten would not be seen.
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
    cast(); // modules may have been added
    promises_.set_waiting(map_, cfg.no_promises);
    partitioning_.place();
    rewrite_script();
    partitioning_.release(parameters_);
    // No rank may request a module before its owner is ready.
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

/// A hook that throws is called again at the next attempt: the model must not
/// train in a state that the hook rejected.
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
  map_.model().modules.front().facts->train(on);
}

bool model_state::is_training() const {
  return map_.model().modules.front().facts->is_training();
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

at::Tensor model_state::gradient(uint32_t tensor) const {
  at::NoGradGuard no_grad;
  auto& x = map_.model().tensors[tensor].tensor;
  return loss_scale_.divide(buckets_ ? buckets_->shards().whole(x) : x.grad());
}

void model_state::watch_gradients() {
  if (rank_.layout().size(comm_group::mp) > 1
      && rank_.counters().updates < gradient_watch::watched_updates)
    watch_.note(map_);
}

// -- steps --------------------------------------------------------------------

bool model_state::minds_changes() const {
  return map_.sees_state_again() || rank_.layout().size(comm_group::dp) > 1;
}

bool model_state::can_take_back() const {
  // Ranks that only share modules roll back only for a wrong order, and those
  // that compute alone only before there are gradients, whose copies cost.
  auto needed = rank_.pipeline().size() > 1
                || (map_.overlaps() && !map_.order().entries().empty())
                || (minds_changes() && !map_.order().trained());
  return promises_.on() && !rank_.config().fast_mode && needed
         && (root_.script || !map_.order().any_hidden());
}

bool model_state::keeps_changes() const {
  return map_.order().keeps_late_changes()
         && std::ranges::all_of(attributes_,
                                [](auto& x) { return x->complete(); });
}

void model_state::keep() {
  if (minds_changes())
    map_.order().keep([this](uint32_t tensor) { return map_.owned(tensor); });
  if (!can_take_back())
    return;
  gradients_.keep(map_);
  attributes_.clear();
  auto& modules = map_.model().modules;
  for (uint32_t i = 0; i < modules.size(); ++i)
    if (map_.owner(module_id{i}) == map_.self())
      if (auto x = modules[i].facts->keep_attributes())
        attributes_.push_back(std::move(x));
}

void model_state::take_back() {
  map_.order().put_back();
  gradients_.put_back();
  map_changes changes{map_};
  for (auto& x : attributes_)
    x->put_back(&changes);
}

void model_state::begin_step(bool again) {
  if (order_learning_.pending())
    order_learning_.begin_step();
  // Promises follow the tensors of calls: they cannot tell that a call changes
  // what another one reads.
  promises_.begin_step(trainability(), again,
                       !map_.order().changing_parameters().empty());
}

void model_state::order_again(const std::set<uint32_t>& tensors) {
  map_.order_again(tensors);
  // The recorded steps did not wait for turns.
  rank_.records().outdate();
  partitioning_.set_order();
  promises_.reconsider();
}

void model_state::keep_order_of(const std::map<uint32_t, std::string>& xs) {
  auto& modules = map_.model().modules;
  for (auto& [module, why] : xs) {
    map_.order().declare(module, why);
    // Others of its class would show the same one after the other.
    for (uint32_t i = 0; i < modules.size(); ++i)
      if (i != module && modules[i].type == modules[module].type)
        map_.order().declare(i, why);
  }
  order_again({});
}

void model_state::run_serially(const std::set<module_id>& modules) {
  rank_.sequencer().set_serial(modules);
  // The recorded steps overlapped microbatches.
  rank_.records().outdate();
}

void model_state::run_serially() {
  map_.order().set_serial();
  rank_.records().outdate();
  partitioning_.set_order();
}

void model_state::end_step(bool complete) {
  promises_.end_step();
  parameters_.end_step();
  if (!complete)
    return map_.order().put_back();
  if (!order_learning_.pending())
    return;
  // The recorded steps waited for turns that no longer exist, and their replies
  // said that calls met state.
  if (order_learning_.end_step())
    rank_.records().outdate();
  partitioning_.set_order();
  promises_.reconsider();
}

} // namespace smp
