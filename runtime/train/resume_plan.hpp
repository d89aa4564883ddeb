#pragma once

// Decides whether and from which checkpoint a configuration resumes. Needs no
// session: a check finds out as much as a run.

#include "runtime/config/config_file.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

class data_source;

/// @returns the settings that a checkpoint remembers: KEY to value
std::map<std::string, std::string> checkpoint_settings(const train_config& x,
                                                       const data_source& data);

struct resume_plan {
  std::string folder; // of the checkpoint
  uint64_t step = 0;  // done
  /// Changed settings, in force from now on: "optimizer.lr = 0.01, was 0.1".
  std::vector<std::string> changes = {};
};

/// @param data of the run, see `make_data`
/// @returns where to resume; nothing if the run begins anew
/// @throws error (config) naming the checkpoint and what to do: none exists
///         where the configuration names one, settings make it another
///         training, its data changed, no step is left, or newer checkpoints
///         are in the way
std::optional<resume_plan> plan_resume(const train_config& x,
                                       const data_source& data);

} // namespace smp
