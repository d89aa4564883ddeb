#pragma once

#include "runtime/config/config_file.hpp"

#include <string>
#include <vector>

namespace smp::app {

/// Tries everything that comes before the first step: data, model, schedule
/// and partition.
/// @param partition gets the partition as text, with colours
/// @returns what is wrong, one line each
std::vector<std::string> check(const train_config& x, std::string& partition);

/// @returns lines that tell on which devices of this machine the ranks would
/// compute; nothing of CUDA is loaded for that
std::string outlook_on_devices(const train_config& x);

} // namespace smp::app
