#pragma once

#include "tp/distributed_module.hpp"

#include <string>
#include <string_view>

namespace smp {

/// @returns the types of single modules, not layers, that can be shared:
/// "Conv1D, Embedding, LayerNorm, Linear"
std::string known_distributions();

/// @returns how modules of this type are shared; null if they cannot be
const distribution* find_distribution(std::string_view type);

} // namespace smp
