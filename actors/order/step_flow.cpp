#include "actors/order/step_flow.hpp"

#include "actors/protocol/result_name.hpp"

#include <string>

namespace smp {

step_flow flow_of(const step_record& record, bool ordered, bool learnt) {
  step_flow result;
  result.microbatches = record.microbatches;
  result.ordered = ordered;
  result.learnt = learnt;
  for (auto& execution : record.executions) {
    auto& copy = result.executions.emplace_back();
    copy.id = execution.id;
    copy.microbatch = execution.microbatch;
    copy.what = execution.what;
    copy.promised = execution.promised;
    copy.after = execution.after;
    copy.needs = execution.needs;
    for (auto& call : execution.calls)
      copy.calls.push_back(
        {call.kind, call.number, call.owner, call.what, call.until});
  }
  return result;
}

namespace {

recorded_call call_of(const step_flow::call& told) {
  recorded_call result;
  result.kind = told.kind;
  result.number = told.number;
  result.owner = told.owner;
  result.what = told.what;
  result.until = told.until;
  return result;
}

/// Without its calls.
recorded_execution execution_of(const step_flow::execution& told) {
  recorded_execution result;
  result.id = told.id;
  result.microbatch = told.microbatch;
  result.what = told.what;
  result.promised = told.promised;
  result.after = told.after;
  result.needs = told.needs;
  return result;
}

} // namespace

step_record record_of(const step_flow& flow, rank_id from,
                      uint64_t microbatches) {
  auto refuse = [from](const std::string& why) {
    throw error{
      failure{error_code::protocol, from, {}, "malformed flow: " + why}};
  };
  if (flow.microbatches != microbatches)
    refuse(std::to_string(flow.microbatches) + " microbatches in a step of "
           + std::to_string(microbatches));
  step_record result;
  result.microbatches = flow.microbatches;
  std::set<uint32_t> call_numbers;
  for (auto& told : flow.executions) {
    auto index = static_cast<uint32_t>(result.executions.size());
    if (told.microbatch.value >= flow.microbatches
        || !result.by_id.emplace(told.id, index).second)
      refuse("an execution is there twice, or of no microbatch");
    auto& execution = result.executions.emplace_back(execution_of(told));
    for (auto& call : told.calls) {
      // Otherwise ranks could call each other forever.
      if (!call_numbers.insert(call.number).second)
        refuse("two calls have the number " + std::to_string(call.number));
      if (call.kind == call_kind::grant && !is_root_request(told.id))
        refuse("an execution that is not a step body waits for a grant");
      execution.calls.push_back(call_of(call));
    }
  }
  return result;
}

} // namespace smp
