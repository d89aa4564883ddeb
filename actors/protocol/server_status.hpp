#pragma once

// What a MODULE SERVER answers when it is asked how its rank is.

#include "actors/protocol/actors.hpp"
#include "actors/protocol/status.hpp"

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
  rank_id from = no_rank; // has to give what it waits for; no_rank: nobody
};

struct server_status : server_counts {
  bool in_line = false; // for the token, which another one has
  std::vector<queued_request> queue;
  std::vector<worker_context_actor> contexts;
  /// Set on pp_rank 0 only.
  pipeline_scheduler_actor scheduler;
};

} // namespace smp
