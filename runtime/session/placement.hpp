#pragma once

#include "runtime/session/distributed_model.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace smp {

/// Places modules and their descendants on devices, as `set_partition` does, by
/// any of their names (smp.manual_partition); before the partition.
/// @throws error (config) naming a module that the model does not have, and
/// similar names
void place_by_name(const distributed_model_base& model,
                   const std::map<std::string, uint64_t>& devices);

/// Places modules on the ranks round-robin, so that as many calls as possible
/// cross ranks; before the partition. Modules whose calls are not intercepted
/// stay with their parent (R20), those that share a tensor stay together (R18).
void place_in_turn(const distributed_model_base& model);

} // namespace smp
