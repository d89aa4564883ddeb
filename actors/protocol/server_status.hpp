#pragma once

// Reply of a MODULE SERVER to a status query.

#include "actors/protocol/actors.hpp"
#include "actors/protocol/status.hpp"

#include <string>
#include <vector>

namespace smp {

/// A request that has no context yet, and why.
struct queued_request {
  request_id id;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  std::string why;
  rank_id from = no_rank; // must supply what it waits for; no_rank: none
  bool later = false;     // belongs to a step that has not begun here
};

struct server_status : server_counts {
  bool in_line = false; // for the token, which another rank holds
  std::vector<queued_request> queue;
  std::vector<worker_context_actor> contexts;
  /// Set on pp_rank 0 only.
  pipeline_scheduler_actor scheduler;
};

} // namespace smp
