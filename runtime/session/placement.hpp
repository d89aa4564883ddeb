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

/// Places modules on the ranks in turn, one by one, so that as many calls as
/// can be cross ranks; before the partition. Modules whose calls nobody sees
/// stay with their parent (R20), those that share a tensor together (R18).
void place_in_turn(const distributed_model_base& model);

} // namespace smp
