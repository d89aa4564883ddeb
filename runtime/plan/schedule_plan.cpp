#include "runtime/plan/schedule_plan.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/placement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/train/trainable.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <numeric>

namespace smp {

using nlohmann::json;

// -- given times --------------------------------------------------------------

module_times read_module_times(const std::string& path) {
  auto refuse = [&path](const std::string& why) {
    throw error{error_code::config, path + ": " + why};
  };
  module_times result;
  try {
    auto x = json::parse(read_text(path));
    result.modules = x.at("modules").get<std::map<std::string, double>>();
    result.backward_ratio = x.value("backward_ratio", result.backward_ratio);
    result.hop_seconds = x.value("hop_seconds", result.hop_seconds);
  } catch (const json::exception& e) {
    refuse(e.what());
  }
  for (auto& [name, seconds] : result.modules)
    if (!(seconds >= 0))
      refuse(fmt::format("modules[\"{}\"] = {} is no time", name, seconds));
  if (!(result.backward_ratio >= 0) || !(result.hop_seconds >= 0))
    refuse("backward_ratio and hop_seconds must not be negative");
  return result;
}

namespace {

/// Gives each named module its time and all others none.
void apply(const module_times& x, const walked_model& walked,
           model_info& model) {
  for (auto& y : model)
    y.compute = 0;
  for (auto& [name, seconds] : x.modules) {
    auto i = walked.find_module(name);
    if (!i)
      throw config_error(
        fmt::format("the model has no module \"{}\", for "
                    "which a time is given",
                    name));
    model[*i].compute = seconds;
  }
}

double forward_seconds(const model_info& model) {
  auto xs = own_compute(model);
  return std::accumulate(xs.begin(), xs.end(), 0.0);
}

} // namespace

// -- prediction ---------------------------------------------------------------

schedule_prediction predict_schedule(const train_config& x,
                                     const std::optional<module_times>& given) {
  virtual_world_options world;
  world.config = x.smp;
  world.config.pipeline_parallel_degree = 1; // of the session that plays
  world.config.default_partition = 0;
  world.config.active_microbatches = effective_active_microbatches(x.smp);
  auto devices = static_cast<uint32_t>(x.smp.pipeline_parallel_degree);
  schedule_prediction result;
  run_virtual_world(1, world, [&](session& s) {
    auto whole = make_trainable(x, first_values::when_needed);
    auto model = whole->distribute();
    place_by_name(*model, x.manual_partition);
    auto decision = model->state().decide(devices, x.smp.default_partition);
    program_times times;
    if (given) {
      apply(*given, model->state().model(), decision.model);
      times.backward_ratio = given->backward_ratio;
      times.hop_seconds = given->hop_seconds;
      times.step_seconds = (1 + given->backward_ratio)
                           * forward_seconds(decision.model);
    }
    result.program = make_program(decision.model, decision.plan, times);
    result.report = s.internals().policies().play(result.program,
                                                  x.smp.microbatches, true);
  });
  return result;
}

std::string schedule_json(const schedule_report& x, std::string_view pipeline,
                          uint64_t microbatches) {
  json result{{"pipeline", pipeline},   {"microbatches", microbatches},
              {"makespan", x.makespan}, {"bubble", x.bubble},
              {"ranks", json::array()}, {"tasks", json::array()}};
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
  return result.dump() + "\n";
}

} // namespace smp
