#pragma once

#include "tp/distributed_module.hpp"

#include <string_view>

namespace smp {

/// @returns how modules of this type are shared; null if they cannot be
const distribution* find_distribution(std::string_view type);

} // namespace smp
