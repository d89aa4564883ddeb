#include "runtime/plan/schedule_plan.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace smp {

using nlohmann::json;

namespace {

/// @returns how calls are simulated: a caller that computes with a result waits
/// for it and stalls the pipeline; one that passes it on does not wait
std::string describe_calls(const session_config& x,
                           const partition_decision& decision,
                           const pipeline_program& program) {
  std::string how = "none, as callers only pass results on";
  auto waits = std::ranges::count_if(program.chain,
                                     [](auto& y) { return y.waits; });
  if (!takes_promises(x))
    how = "all (smp.fast_mode = false)";
  else if (waits > 0)
    how = fmt::format(
      "{} in each phase, for results used at once, lists or "
      "state",
      waits);
  else if (!decision.traced)
    how = "assumed none, as no trace shows what callers do";
  return "calls that wait: " + how;
}

} // namespace

// -- prediction ---------------------------------------------------------------

schedule_prediction predict_schedule(const train_config& x) {
  schedule_prediction result;
  decide_alone(x, [&](lone_decision& run) {
    auto& decision = run.decision;
    result.program = make_program(decision.model, decision.plan,
                                  decision.times);
    result.report = run.of.internals().policies().play(
      result.program, x.smp.microbatches, true);
    result.calls = describe_calls(x.smp, decision, result.program);
  });
  return result;
}

std::string schedule_json(const schedule_prediction& prediction,
                          std::string_view pipeline, uint64_t microbatches) {
  auto& x = prediction.report;
  json result{{"pipeline", pipeline},     {"microbatches", microbatches},
              {"makespan", x.makespan},   {"bubble", x.bubble},
              {"ranks", json::array()},   {"tasks", json::array()},
              {"calls", prediction.calls}};
  for (size_t i = 0; i < x.busy.size(); ++i)
    result["ranks"].push_back({{"busy", x.busy[i]},
                               {"live", x.peak_live[i]},
                               {"activations", x.peak_activations[i]}});
  for (auto& y : x.timeline)
    result["tasks"].push_back(
      {{"rank", y.device},
       {"microbatch", y.what.microbatch.value},
       {"phase", y.what.what == phase::forward ? "forward" : "backward"},
       {"begin", y.begin},
       {"end", y.end}});
  return json_text(result) + "\n";
}

} // namespace smp
