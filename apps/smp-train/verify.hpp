#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/config/config_file.hpp"

#include <atomic>
#include <string>

namespace smp {

class session;
class train_listener;

} // namespace smp

namespace smp::app {

/// How a comparison ended.
enum class verify_end : uint8_t { equal, different, interrupted };

/// Prepares for assigning modules to the ranks in turn.
/// @param config becomes one that places no modules
/// @throws error (config) if there is one rank only
void prepare_split(train_config& config);

/// A long comparison must not end with a file that cannot be written.
/// @throws error (config) if the result could not be written to `path`
void check_json_file(const std::string& path);

/// Compares the job of `config` with the same job in one process; every rank
/// calls this. Rank 0 shows the steps and writes the JSON file.
/// @param listener receives the events of the pipeline's steps
verify_end verify(session& s, const command_line& cmd,
                  const train_config& config, const std::string& run_dir,
                  train_listener& listener, const std::atomic<bool>& stop);

} // namespace smp::app
