#pragma once

#include "actors/protocol/actors.hpp"
#include "actors/server/executor.hpp"

#include <caf/stateful_actor.hpp>

#include <memory>

namespace smp {

/// Holds one execution; replies at any time with its state.
struct worker_context_state {
  static inline const char* name = "smp.worker-context";

  using pointer = worker_context_actor::stateful_pointer<worker_context_state>;

  explicit worker_context_state(pointer self) : self(self) {
    // nop
  }

  ~worker_context_state();

  context_status status() const;

  pointer self;
  std::shared_ptr<executor> code;
};

worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self,
               std::shared_ptr<executor> code);

} // namespace smp
