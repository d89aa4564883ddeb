#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/config/config_file.hpp"

namespace smp::app {

/// The command `schedule`: draws the predicted step.
/// @param terminal draw with colours
/// @throws error (config) naming what is wrong with the schedule
void draw_schedule(const schedule_command& x, const train_config& config,
                   bool terminal);

} // namespace smp::app
