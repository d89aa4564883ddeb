#pragma once

#include "actors/board/call_slot.hpp"
#include "actors/protocol/request.hpp"
#include "actors/protocol/status.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

namespace smp {

/// State of a WORKER CONTEXT (R24). Only the context writes it. The stall
/// search reads it, even while the actors of the rank are stuck.
/// Thread-safe.
class context_notes {
public:
  using clock = std::chrono::steady_clock;
  using slot_ptr = std::shared_ptr<call_slot>;

  /// What is known about a call that the context waits for.
  struct awaited_call {
    call_kind kind = call_kind::remote;
    rank_id owner;
    module_id module;
    phase what = phase::forward;
    wait_reason why;
    completion_ptr done;
  };

  struct view {
    context_state state = context_state::idle;
    /// The request being served, or the last one served, without its body.
    request current;
    /// Set while the state is PENDING.
    awaited_call waits_for;
    clock::time_point since = clock::now();
    uint64_t served = 0;
    slot_ptr slot;
  };

  explicit context_notes(context_id id) : id_(id) {
    // nop
  }

  context_id id() const noexcept {
    return id_;
  }

  // -- the context ------------------------------------------------------------
  // @returns false, and changes nothing, if the context is in another state.

  /// IDLE -> EXECUTING
  bool start(const request& x, clock::time_point now);

  /// EXECUTING -> PENDING
  bool park(const call& x, clock::time_point now);

  /// PENDING -> EXECUTING
  bool resume(clock::time_point now);

  /// EXECUTING -> IDLE
  bool finish(clock::time_point now);

  // -- anybody ----------------------------------------------------------------

  context_state state() const;

  view look() const;

private:
  bool move(context_state from, context_state to, clock::time_point now);

  const context_id id_;
  mutable std::mutex mutex_;
  view view_;
};

} // namespace smp
