#pragma once

// What actors answer when they are asked how they are. The MODULE SERVER's
// answer holds handles: actors/protocol/server_status.hpp.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// Where a WORKER CONTEXT stands (R24).
enum class context_state : uint8_t { idle, executing, pending };

constexpr context_state last_of(context_state) noexcept {
  return context_state::pending;
}

/// @returns the state in capitals, as people write it.
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

/// What a MODULE SERVER counts.
struct server_counts {
  rank_id rank;
  step_id step;
  bool in_step = false;
  uint64_t ready = 0;   // work that waits for the token
  uint64_t later = 0;   // requests of a later step
  uint64_t held = 0;    // requests whose turn it is not (R19)
  uint64_t blocked = 0; // requests that wait for objects or for another one
  uint64_t dropped = 0; // requests of an older step
  uint64_t unknown = 0; // responses that nobody waits for
  uint64_t pending = 0; // calls without an answer
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
  /// In this state for so long.
  double seconds = 0;
  uint64_t served = 0;
};

struct scheduler_status {
  step_id step;
  uint64_t running = 0; // microbatches that were started and did not end
  uint64_t left = 0;    // microbatches that did not end
  /// What the schedule actor of the user owes an answer to, and since when in
  /// seconds; empty if nothing.
  std::string asks;
  double seconds = 0;
};

struct member_status {
  rank_id rank;
  std::vector<failure> losses; // heard of, first one first
};

struct supervisor_status {
  uint64_t world_size = 0;
  std::vector<rank_id> present;
  std::vector<rank_id> gone;   // said goodbye
  std::vector<failure> losses; // first one first
  /// By a signal, says who sees their processes.
  std::vector<rank_id> stopped;
};

struct stall_status {
  uint64_t reports = 0;
  /// The last report.
  std::string text;
  /// Nothing moved since.
  bool standing = false;
  /// So long nothing moved on any rank.
  double quiet_seconds = 0;
};

} // namespace smp
