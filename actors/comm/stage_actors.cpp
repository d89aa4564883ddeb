#include "actors/comm/stage_actors.hpp"

#include "actors/protocol/actor_system.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>

#include <utility>

namespace smp {

namespace {

/// One stage; passes each of its messages to `comm_fabric`.
template <comm_stage Stage>
struct comm_stage_state {
  static inline const char* name = to_string(Stage);

  using pointer = comm_stage_actor::stateful_pointer<comm_stage_state>;
};

template <comm_stage Stage>
comm_stage_actor::behavior_type
stage_actor(typename comm_stage_state<Stage>::pointer, comm_fabric* of) {
  return {
    [of](comm_message_ptr& x) { of->handle(Stage, std::move(x)); },
    [of](status_atom) { return of->status_of(Stage); },
  };
}

template <comm_stage Stage>
comm_stage_actor spawn_stage(caf::actor_system& system, comm_fabric& of) {
  // Such a stage copies, or waits for a device.
  if (of.takes_turns(Stage))
    return system.spawn<caf::detached>(stage_actor<Stage>, &of);
  return system.spawn(stage_actor<Stage>, &of);
}

template <size_t... I>
std::array<comm_stage_actor, comm_stages>
spawn_each(caf::actor_system& system, comm_fabric& of,
           std::index_sequence<I...>) {
  return {spawn_stage<static_cast<comm_stage>(I)>(system, of)...};
}

} // namespace

stage_actors::stage_actors(std::shared_ptr<actor_host> host, comm_fabric& of)
  : host_(std::move(host)),
    all_(spawn_each(host_->get().system, of,
                    std::make_index_sequence<comm_stages>{})) {
  // nop
}

stage_actors::~stage_actors() {
  end();
}

void stage_actors::hand_over(comm_stage to, comm_message_ptr x,
                             std::chrono::milliseconds after) {
  if (after.count() == 0)
    return caf::anon_send(at(to), std::move(x));
  caf::delayed_anon_send(at(to), after, std::move(x));
}

void stage_actors::end() {
  if (std::exchange(ended_, true))
    return;
  caf::scoped_actor self{host_->get().system};
  for (auto& x : all_) {
    self->monitor(x);
    self->send_exit(x, caf::exit_reason::user_shutdown);
  }
  for (size_t i = 0; i < all_.size(); ++i)
    self->receive([](const caf::down_msg&) {});
}

} // namespace smp
