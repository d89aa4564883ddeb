#pragma once

#include "actors/comm/comm_core.hpp"
#include "actors/protocol/actors.hpp"

#include <caf/actor_system.hpp>

#include <array>

namespace smp {

/// @returns the actors of all stages, indexed by stage. With a device path,
/// those that copy have threads of their own, where nothing else may run.
std::array<comm_stage_actor, comm_stages>
spawn_stages(caf::actor_system& system, comm_core& core);

} // namespace smp
