#pragma once

#include "runtime/config/config_file.hpp"

#include <string>

namespace smp::app {

/// What a run left is never overwritten. (A directory without a finished step
/// holds nothing that somebody could miss.) What a run that was killed had not
/// written whole is removed. Before any rank of this run writes.
/// @throws error (config) naming what is in `path`, and what to do
void claim_run_dir(const std::string& path);

/// Makes `wanted`, or a new directory runs/TIME-NAME below the current one,
/// NAME being that of the configuration file.
/// @returns the directory
/// @throws error (config) naming the directory and why it cannot be made
std::string make_run_dir(const std::string& wanted,
                         const std::string& config_path);

/// Writes `run_dir`/config.toml, which runs the same again.
/// @throws error (config) naming the file
void write_run_config(const std::string& run_dir, const train_config& x);

} // namespace smp::app
