#pragma once

#include <string>

namespace smp::app {

/// Makes `wanted`, or a new directory runs/TIME-NAME below the current one,
/// NAME being that of the configuration file.
/// @returns the directory
/// @throws error (config) naming the directory and why it cannot be made
std::string make_run_dir(const std::string& wanted,
                         const std::string& config_path);

} // namespace smp::app
