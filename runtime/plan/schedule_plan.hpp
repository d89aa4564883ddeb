#pragma once

// What a configuration's steps will be like, without its ranks.

#include "partition/program.hpp"
#include "partition/timeline.hpp"
#include "runtime/config/config_file.hpp"

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace smp {

/// Times that somebody measured or wants to assume.
struct module_times {
  /// Seconds of one forward call, with everything below, by module path; all
  /// else takes no time.
  std::map<std::string, double> modules;
  double backward_ratio = 2; // backward time over forward time
  double hop_seconds = 0;    // from one rank to another
};

/// Reads {"modules": {"h.0": 0.01, ...}, "backward_ratio": 2,
/// "hop_seconds": 1e-4}; only `modules` is required.
/// @throws error (config) naming the file and what is wrong
module_times read_module_times(const std::string& path);

struct schedule_prediction {
  pipeline_program program;
  schedule_report report;
};

/// Partitions the model for all ranks and plays the schedule, in this process
/// and with one copy of the model.
/// @param times default: what the partition counts with, in shares of a
///        microbatch's time on one device
/// @throws error (config) naming the first task that is wrong, or a module of
///         `times` that does not exist
schedule_prediction
predict_schedule(const train_config& x,
                 const std::optional<module_times>& times = {});

/// @returns the prediction as one JSON object: `pipeline`, `microbatches`,
/// `makespan` (seconds), `bubble`, `ranks` (each with `busy`, `live`,
/// `activations`) and `tasks` (each with `rank`, `microbatch`, `phase`,
/// `begin`, `end`).
std::string schedule_json(const schedule_report& x, std::string_view pipeline,
                          uint64_t microbatches);

} // namespace smp
