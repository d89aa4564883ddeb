#pragma once

#include "apps/smp-train/command_line.hpp"

namespace smp::app {

/// The command `partition --tree`: prints the decision for a tree given as
/// data, and writes it.
/// @throws error (config) naming what is wrong with the files
void partition_tree_file(const partition_command& x, bool terminal);

} // namespace smp::app
