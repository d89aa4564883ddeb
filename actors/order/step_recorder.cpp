#include "actors/order/step_recorder.hpp"

#include "actors/protocol/request_number.hpp"

#include <algorithm>
#include <utility>

namespace smp {

step_recorder::step_recorder(uint64_t microbatches) {
  record_.microbatches = microbatches;
}

void step_recorder::admitted(const task& x) {
  record_.admission.push_back(x);
}

// -- the token ----------------------------------------------------------------

void step_recorder::started(const request& x) {
  ++served_;
  auto index = static_cast<uint32_t>(record_.executions.size());
  auto& y = record_.executions.emplace_back();
  y.id = without_step(x.id);
  y.microbatch = x.microbatch;
  y.what = x.what;
  y.promised = x.promised;
  y.after = x.after;
  y.needs = x.needs;
  y.interrupted.push_back(false);
  record_.by_id.emplace(y.id, index);
  record_.order.push_back({index, 0});
}

void step_recorder::resumed(request_id execution) {
  ++served_;
  auto& x = at(execution);
  x.interrupted.push_back(false);
  auto index = static_cast<uint32_t>(&x - record_.executions.data());
  auto segment = static_cast<uint32_t>(x.interrupted.size() - 1);
  record_.order.push_back({index, segment});
}

void step_recorder::waits(request_id execution) {
  waiting_[execution] = served_;
}

void step_recorder::woken(request_id execution) {
  if (auto since = waiting_.extract(execution);
      since && since.mapped() != served_)
    at(execution).interrupted.back() = true;
  ++served_;
}

void step_recorder::called(request_id execution, request_id id, const call& x) {
  auto number = call_number(id);
  auto& last = x.kind == call_kind::promise ? record_.last_promise
                                            : record_.last_number;
  last = std::max(last, number & ~promise_bit);
  recorded_call noted{x.kind, number,     x.owner, x.module,
                      x.what, x.why.what, x.plan,  {}};
  for (auto y : x.until)
    noted.until.push_back(without_step({id.origin, y}).number);
  at(execution).calls.push_back(std::move(noted));
}

step_record step_recorder::take() {
  return std::move(record_);
}

recorded_execution& step_recorder::at(request_id execution) {
  return record_.executions[record_.by_id.at(without_step(execution))];
}

} // namespace smp
