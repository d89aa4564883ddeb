#pragma once

#include "actors/board/context_notes.hpp"
#include "actors/protocol/actors.hpp"
#include "actors/protocol/rank_services.hpp"

#include <caf/stateful_actor.hpp>

#include <memory>

namespace smp {

/// Runs one request at a time and can be asked at any time where it stands.
struct worker_context_state {
  static inline const char* name = "smp.worker-context";

  using pointer = worker_context_actor::stateful_pointer<worker_context_state>;

  explicit worker_context_state(pointer self) : self(self) {
    // nop
  }

  /// @returns what it means that the notes refused to go on.
  caf::error refusal() const;

  context_status status() const;

  pointer self;
  std::shared_ptr<context_notes> notes;
  module_server_actor server;

  /// Turns the executor's calls into messages to this actor.
  std::unique_ptr<executor_listener> listener;

  /// Last member: dies first, so that its thread never meets a dead listener.
  executor_ptr exec;
};

/// @param notes where this context writes down where it stands
worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self,
               std::shared_ptr<context_notes> notes, module_server_actor server,
               rank_services* services);

} // namespace smp
