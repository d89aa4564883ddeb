#pragma once

// The actors of one rank without CAF in sight.

#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/run_status.hpp"
#include "actors/protocol/status.hpp"
#include "actors/server/server_options.hpp"
#include "transport/fabric.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// What a rank holds and waits for, as text for people and as numbers.
struct node_status : server_counts {
  struct context {
    context_id id;
    /// "IDLE", "EXECUTING" or "PENDING".
    std::string state;
    request_id request;
    microbatch_id microbatch;
    module_id module;
    phase what = phase::forward;
    /// What it waits for while PENDING, and since when in seconds.
    std::string waits_for;
    double seconds = 0;
    uint64_t served = 0;
  };

  std::vector<context> contexts;
  /// PIPELINE SCHEDULER, on pp_rank 0 only: microbatches alive and left.
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

  /// Opens the gate for a step (R1); on pp_rank 0 runs its microbatches.
  /// `done` is called once, on any thread, when the step is over on this rank:
  /// the gate is closed again and nothing of the step executes here.
  /// @pre no step is running
  void begin_step(const run_step& x, std::function<void(step_report)> done);

  /// Takes a message of kind request, response or control.
  void deliver(rank_id from, message x);

  /// Fails whatever waits for `x.rank`, now and later, and the running step.
  void rank_down(const failure& x);

  /// Asks all actors of the rank. @throws error when they do not answer in
  /// time, naming the first that did not.
  node_status status(std::chrono::milliseconds limit);

  /// Adds what only the actors of the rank know to a view of its board; leaves
  /// it incomplete when they do not answer within `limit`.
  void complete(rank_view& x, std::chrono::milliseconds limit);

  /// Adds what the actors of the rank tell to what others may see of it. Those
  /// that do not answer within `limit` are named all the same.
  void describe(rank_status& x, std::chrono::milliseconds limit);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
