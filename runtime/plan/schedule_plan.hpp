#pragma once

// Predicts the steps of a configuration without starting its ranks.

#include "partition/schedule/program.hpp"
#include "partition/schedule/timeline.hpp"
#include "runtime/config/config_file.hpp"

#include <string>
#include <string_view>

namespace smp {

struct schedule_prediction {
  pipeline_program program;
  schedule_report report;
  /// What it assumes about calls that wait for results: one line, for people.
  std::string calls;
};

/// Partitions the model for all ranks and simulates the schedule, in this
/// process and with one copy of the model. Modules take the times that the
/// partition uses; without measured or given times, a microbatch takes one
/// second on one device.
/// @throws error (config) naming the first task that is wrong
schedule_prediction predict_schedule(const train_config& x);

/// @returns the prediction as one JSON object: `pipeline`, `microbatches`,
/// `makespan` (seconds), `bubble`, `calls`, `ranks` (each with `busy`, `live`,
/// `activations`) and `tasks` (each with `rank`, `microbatch`, `phase`,
/// `begin`, `end`).
std::string schedule_json(const schedule_prediction& x,
                          std::string_view pipeline, uint64_t microbatches);

} // namespace smp
