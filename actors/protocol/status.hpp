#pragma once

// Replies of actors to status queries. The reply of a MODULE SERVER contains
// handles, so it is in actors/protocol/server_status.hpp.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// State of a WORKER CONTEXT (R24).
enum class context_state : uint8_t { idle, executing, pending };

constexpr context_state last_of(context_state) noexcept {
  return context_state::pending;
}

/// @returns the state in capitals, for display.
constexpr const char* to_string(context_state x) noexcept {
  switch (x) {
    case context_state::idle:
      return "IDLE";
    case context_state::executing:
      return "EXECUTING";
    case context_state::pending:
      return "PENDING";
  }
  return "UNKNOWN";
}

/// Counters of a MODULE SERVER.
struct server_counts {
  rank_id rank;
  step_id step;
  bool in_step = false;
  uint64_t ready = 0;   // work that waits for the token
  uint64_t later = 0;   // requests of a later step
  uint64_t held = 0;    // requests whose turn it is not (R19)
  uint64_t blocked = 0; // requests that wait for objects or an earlier request
  uint64_t dropped = 0; // requests of an older step
  uint64_t unknown = 0; // responses that no call waits for
  uint64_t pending = 0; // calls that have no answer yet
};

struct context_status {
  context_id context;
  context_state state = context_state::idle;
  request_id current;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  /// What it waits for while PENDING.
  std::string waits_for;
  /// Time in this state.
  double seconds = 0;
  uint64_t served = 0;
};

struct scheduler_status {
  step_id step;
  uint64_t running = 0; // microbatches that have started but not ended
  uint64_t left = 0;    // microbatches that have not ended
  /// The event that the user's schedule actor has not answered yet, and for how
  /// many seconds; empty if there is none.
  std::string asks;
  double seconds = 0;
};

struct member_status {
  rank_id rank;
  std::vector<failure> losses; // losses it has heard of, first one first
};

struct supervisor_status {
  uint64_t world_size = 0;
  std::vector<rank_id> present;
  std::vector<rank_id> gone;   // said goodbye
  std::vector<failure> losses; // first one first
  /// Stopped by a signal, as reported by launchers and neighbours.
  std::vector<rank_id> stopped;
};

struct stall_status {
  uint64_t reports = 0;
  /// The last report.
  std::string text;
  /// Nothing has happened since that report.
  bool standing = false;
  /// For how long nothing has happened on any rank.
  double quiet_seconds = 0;
};

} // namespace smp
