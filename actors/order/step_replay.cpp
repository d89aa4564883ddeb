#include "actors/order/step_replay.hpp"

#include "actors/protocol/result_name.hpp"

#include <algorithm>
#include <utility>

namespace smp {

namespace {

const char* to_text(phase x) {
  return x == phase::forward ? "forward" : "backward";
}

std::string describe(call_kind kind, rank_id owner, module_id module,
                     phase what, const std::string& name) {
  if (kind == call_kind::grant)
    return "waits for the grant of its backward phase";
  if (kind == call_kind::wait)
    return "waits for results of " + name;
  auto text = name.empty() ? "module " + std::to_string(module.value) + ", "
                               + to_text(what)
                           : name;
  return "calls " + text + ", on rank " + std::to_string(owner.value)
         + (kind == call_kind::promise ? ", and goes on" : "");
}

std::string describe(const recorded_call& x) {
  return describe(x.kind, x.owner, x.module, x.what, x.name);
}

std::string describe(const call& x) {
  return describe(x.kind, x.owner, x.module, x.what, x.why.what);
}

std::string divergence(const std::string& expected, const std::string& seen) {
  return "the record " + expected + ", this step " + seen;
}

} // namespace

step_replay::step_replay(std::shared_ptr<const step_record> record,
                         bool same_order)
  : record_(std::move(record)), same_order_(same_order) {
  // nop
}

// -- the order ----------------------------------------------------------------

bool step_replay::next_is(request_id execution, uint32_t segment) const {
  if (holder_ || position_ >= record_->order.size())
    return false;
  auto& next = record_->order[position_];
  return next.segment == segment
         && record_->executions[next.execution].id == without_step(execution);
}

bool step_replay::next_is(const request& x) const {
  return next_is(x.id, 0);
}

bool step_replay::may_resume(request_id execution) const {
  auto i = running_.find(execution);
  return i != running_.end() && next_is(execution, i->second.segment + 1);
}

void step_replay::started(const request& x) {
  ++position_;
  running_[x.id] = {};
}

void step_replay::resumed(request_id execution) {
  ++position_;
  ++running_[execution].segment;
}

void step_replay::waits(request_id execution, bool for_peers) {
  auto* x = find(execution);
  auto i = running_.find(execution);
  if (x == nullptr || i == running_.end())
    return;
  auto segment = i->second.segment;
  if ((for_peers && same_order_)
      || (segment < x->interrupted.size() && !x->interrupted[segment]))
    holder_ = execution;
}

void step_replay::woken(request_id execution) {
  if (holder_ == execution)
    holder_.reset();
}

// -- the flow -----------------------------------------------------------------

step_replay::known_call step_replay::call(request_id execution,
                                          const smp::call& x) {
  auto* known = find(execution);
  if (known == nullptr)
    return {0, "the record does not have this execution"};
  auto& calls = running_[execution].calls;
  if (calls >= known->calls.size())
    return {0, divergence("ends here", describe(x))};
  auto& expected = known->calls[calls];
  if (!same_place(expected, x))
    return {0, divergence(describe(expected), describe(x))};
  ++calls;
  return {expected.number, {}};
}

std::string step_replay::end(request_id execution) {
  auto* known = find(execution);
  if (known == nullptr)
    return "the record does not have this execution";
  auto calls = running_[execution].calls;
  if (calls < known->calls.size())
    return divergence(describe(known->calls[calls]), "ends here");
  return {};
}

} // namespace smp
