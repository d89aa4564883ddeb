#pragma once

#include "runtime/config/config_file.hpp"

#include <string>
#include <vector>

namespace smp::app {

/// A mode in which steps run, whatever the configuration says.
struct run_mode {
  const char* name;
  bool fast = false;          // smp.fast_mode
  bool replays = false;       // smp.static_mode
  bool deterministic = false; // smp.deterministic_server
};

/// @param names of modes, as the command line has them, or "all"
/// @returns them, each once, in the order in which `all` has them
std::vector<run_mode> modes_of(const std::vector<std::string>& names);

/// @returns the names that `modes_of` takes, "all" last
std::vector<std::string> names_of_modes();

/// Makes `config` run in the mode.
void set_mode(train_config& config, const run_mode& x);

/// @returns the words of a command line without some options and their values
std::vector<std::string>
without_options(const std::vector<std::string>& xs,
                const std::vector<std::string>& options);

/// @returns "out-static.json" for "out.json"; empty for an empty path
std::string path_of_mode(const std::string& path, const run_mode& x);

} // namespace smp::app
