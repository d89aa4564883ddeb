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

} // namespace smp::app
