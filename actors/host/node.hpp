#pragma once

// The actors of one rank, in a header that does not include CAF.

#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/run_status.hpp"
#include "actors/protocol/status.hpp"
#include "actors/server/server_options.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

struct server_handle;

/// What a rank holds and waits for, as texts and as numbers.
struct node_status : server_counts {
  struct context {
    context_id id;
    /// "IDLE", "EXECUTING" or "PENDING".
    std::string state;
    request_id request;
    microbatch_id microbatch;
    module_id module;
    phase what = phase::forward;
    /// What it waits for while PENDING, and for how many seconds.
    std::string waits_for;
    double seconds = 0;
    uint64_t served = 0;
  };

  std::vector<context> contexts;
  /// PIPELINE SCHEDULER, on pp_rank 0 only: microbatches running and left.
  uint64_t microbatches_running = 0;
  uint64_t microbatches_left = 0;
};

/// MODULE SERVER, its WORKER CONTEXTS and, on pp_rank 0, the PIPELINE
/// SCHEDULER of one rank.
class node {
public:
  node(actor_host& host, server_options options);

  /// Ends the actors: parked executions unwind as cancelled and are joined.
  ~node();

  /// Opens the gate for a step (R1); on pp_rank 0 also runs its microbatches.
  /// `done` is called once, on any thread, when the step is over on this rank:
  /// the gate is closed again and no code of the step executes here.
  /// @pre no step is running
  void begin_step(const run_step& x, std::function<void(step_report)> done);

  /// @returns who takes messages of kind request, response and control; those
  /// that arrive after the end of this node are dropped
  std::shared_ptr<const server_handle> server() const;

  /// Fails the running step and all waits for `x.rank`, now and later.
  void rank_down(const failure& x);

  /// Queries all actors of the rank. @throws error if one does not answer in
  /// time, naming the first such actor.
  node_status status(std::chrono::milliseconds limit);

  /// Adds to a view of the rank's board what only the actors know; leaves it
  /// incomplete if they do not answer within `limit`.
  void complete(rank_view& x, std::chrono::milliseconds limit);

  /// Adds the status of the rank's actors to `x`, for clients outside. An actor
  /// that does not answer within `limit` is listed as silent.
  void describe(rank_status& x, std::chrono::milliseconds limit);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
