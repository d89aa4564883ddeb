#pragma once

// What a MODULE SERVER answers when it is asked how its rank is.

#include "actors/protocol/actors.hpp"

#include <string>
#include <vector>

namespace smp {

/// A request that no context has yet, and why.
struct queued_request {
  request_id id;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  std::string why;
};

struct server_status {
  rank_id rank;
  step_id step;
  bool in_step = false;
  uint64_t ready = 0;   // work that waits for the token
  bool in_line = false; // for the token, which another one has
  uint64_t later = 0;   // requests of a later step
  uint64_t held = 0;    // requests whose turn it is not (R19)
  uint64_t blocked = 0; // requests that wait for objects or for another one
  uint64_t dropped = 0; // requests of an older step
  uint64_t unknown = 0; // responses that nobody waits for
  uint64_t pending = 0; // calls without an answer
  std::vector<queued_request> queue;
  std::vector<worker_context_actor> contexts;
  /// Set on pp_rank 0 only.
  pipeline_scheduler_actor scheduler;
};

} // namespace smp
