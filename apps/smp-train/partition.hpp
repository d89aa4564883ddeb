#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/config/config_file.hpp"

namespace smp::app {

/// The command `partition --tree`: prints the decision for a tree given as
/// data, and writes it.
/// @throws error (config) naming what is wrong with the files
void partition_tree_file(const partition_command& x, bool terminal);

/// The command `partition CONFIG`: the same for the model of a configuration.
/// @throws error (config) naming what is wrong with model, data or placement
void partition_config(const partition_command& x, const train_config& config,
                      bool terminal);

} // namespace smp::app
