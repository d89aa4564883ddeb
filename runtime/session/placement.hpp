#pragma once

#include "runtime/session/distributed_model.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace smp {

/// Places modules with all that is below them on devices, as `set_partition`
/// does, by any of their names (smp.manual_partition); before the partition.
/// @throws error (config) naming a module that the model does not have, and
///         those that may have been meant
void place_by_name(const distributed_model_base& model,
                   const std::map<std::string, uint64_t>& devices);

} // namespace smp
