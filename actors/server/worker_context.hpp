#pragma once

#include "actors/protocol/actors.hpp"
#include "actors/protocol/executor.hpp"

#include <caf/stateful_actor.hpp>

#include <chrono>
#include <memory>
#include <string>

namespace smp {

/// Runs one request at a time and can be asked at any time where it stands.
struct worker_context_state {
  static inline const char* name = "smp.worker-context";

  using pointer = worker_context_actor::stateful_pointer<worker_context_state>;

  explicit worker_context_state(pointer self) : self(self) {
    // nop
  }

  /// @returns an error if `x` is not the current state
  caf::error check(context_state x) const;

  /// Does `from -> to`.
  /// @returns an error if `from` is not the current state
  caf::error move(context_state from, context_state to);

  context_status answer() const;

  pointer self;
  context_status status;
  std::chrono::steady_clock::time_point since;
  /// What the last call was, in words.
  std::string waits_for;
  module_server_actor server;

  /// Turns the executor's calls into messages to this actor.
  std::unique_ptr<executor_listener> listener;

  /// Last member: dies first, so that its thread never meets a dead listener.
  executor_ptr exec;
};

/// @param id how the MODULE SERVER knows this context
worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self, context_id id,
               module_server_actor server, const executor_factory& make);

} // namespace smp
