#pragma once

#include "actors/board/call_slot.hpp"
#include "actors/protocol/request.hpp"
#include "actors/protocol/status.hpp"

#include <chrono>
#include <cstdint>
#include <memory>

namespace smp {

/// What a WORKER CONTEXT does (R24).
struct context_view {
  using clock = std::chrono::steady_clock;

  /// A call that it waits for, without its body.
  struct awaited_call {
    call_kind kind = call_kind::remote;
    rank_id owner;
    module_id module;
    phase what = phase::forward;
    wait_reason why;
    completion_ptr done;
  };

  context_state state = context_state::idle;
  /// The request being served, or the last one served, without its body.
  request current;
  /// Set while the state is PENDING.
  awaited_call waits_for;
  clock::time_point since = clock::now();
  uint64_t served = 0;
  /// Null while the state is IDLE.
  std::shared_ptr<call_slot> slot;
};

} // namespace smp
