#include "actors/comm/stage_actors.hpp"

#include <caf/stateful_actor.hpp>

#include <utility>

namespace smp {

namespace {

/// One stage; passes each of its messages to `comm_core`.
template <comm_stage Stage>
struct comm_stage_state {
  static inline const char* name = to_string(Stage);

  using pointer = comm_stage_actor::stateful_pointer<comm_stage_state>;
};

/// @param core outlives the actor
template <comm_stage Stage>
comm_stage_actor::behavior_type
stage_actor(typename comm_stage_state<Stage>::pointer, comm_core* core) {
  return {
    [core](comm_message_ptr& x) { core->handle(Stage, std::move(x)); },
    [core](status_atom) { return core->status_of(Stage); },
  };
}

template <comm_stage Stage>
comm_stage_actor spawn_stage(caf::actor_system& system, comm_core& core) {
  // Such a stage copies, or waits for a device.
  if (core.takes_turns(Stage))
    return system.spawn<caf::detached>(stage_actor<Stage>, &core);
  return system.spawn(stage_actor<Stage>, &core);
}

template <size_t... I>
std::array<comm_stage_actor, comm_stages>
spawn_each(caf::actor_system& system, comm_core& core,
           std::index_sequence<I...>) {
  return {spawn_stage<static_cast<comm_stage>(I)>(system, core)...};
}

} // namespace

std::array<comm_stage_actor, comm_stages>
spawn_stages(caf::actor_system& system, comm_core& core) {
  return spawn_each(system, core, std::make_index_sequence<comm_stages>{});
}

} // namespace smp
