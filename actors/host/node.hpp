#pragma once

// The actors of one rank behind an interface without CAF: what runtime/ sees.

#include "actors/protocol/executor.hpp"
#include "actors/board/rank_view.hpp"
#include "partition/schedule.hpp"
#include "transport/fabric.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class execution_token;
class rank_board;
class record_book;
class microbatch_sequencer;
struct user_schedule;

/// The actor system of a process; every rank of the process lives in it. Its
/// pool has one thread (facts: more threads cost wake-ups), so no handler may
/// block.
class actor_host {
public:
  actor_host();
  ~actor_host();
  actor_host(const actor_host&) = delete;
  actor_host& operator=(const actor_host&) = delete;

  struct impl;

  impl& get() noexcept {
    return *impl_;
  }

private:
  std::unique_ptr<impl> impl_;
};

/// Makes the execution token that all ranks of one process share (R26).
std::shared_ptr<execution_token> make_execution_token();

/// Makes the schedule of one step; called at its begin, on the pool thread.
using schedule_factory
  = std::function<std::unique_ptr<schedule>(uint64_t microbatches)>;

/// Makes the service order of this rank for one step; called at its begin, on
/// the pool thread.
using order_factory = std::function<service_order(uint64_t microbatches)>;

struct node_options {
  rank_id self;
  /// Ranks of the pipeline group by pp_rank; `self` among them. The first one
  /// has the PIPELINE SCHEDULER.
  std::vector<rank_id> pipeline;
  /// Outlives the node. The node sends kinds request, response and control.
  smp::fabric* fabric = nullptr;
  std::shared_ptr<execution_token> token;
  /// Where the actors write down what they do, for who looks for a stall.
  /// Default: a new one, which nobody reads.
  std::shared_ptr<rank_board> board;
  executor_factory make_executor;
  order_factory make_order;
  schedule_factory make_schedule;
  /// An actor of the user's (actors/schedule/user_schedule.hpp), instead of
  /// `make_schedule`.
  std::shared_ptr<const user_schedule> schedule_actor;
  /// Orders the microbatches in modules that change state.
  std::shared_ptr<smp::microbatch_sequencer> sequencer;
  /// @returns the modules of `sequencer` that a request enters; any thread.
  std::function<std::vector<module_id>(const request&)> ordered_modules;
  /// Records steps and replays them (R33); null: neither.
  std::shared_ptr<record_book> records;
  /// Begins to bring the objects that a request needs. @returns what is done
  /// when they are here, or null. Any thread; must not block.
  std::function<completion_ptr(const request&)> gather;
  /// The step has its first failure. Any thread; must not block.
  std::function<void(step_id, const failure&)> on_step_failed;
  /// Nothing of the step executes here any more. Any thread; must not block.
  std::function<void(step_id)> on_step_over;
  /// All of a microbatch is over: what is kept for it can go (R3). Any thread;
  /// must not block.
  std::function<void(step_id, microbatch_id)> on_microbatch_done;
};

/// What a rank holds and waits for, as text for people and as numbers.
struct node_status {
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
  std::vector<context> contexts;
  /// PIPELINE SCHEDULER, on pp_rank 0 only: microbatches alive and left.
  uint64_t microbatches_running = 0;
  uint64_t microbatches_left = 0;
};

/// MODULE SERVER, its WORKER CONTEXTS and, on pp_rank 0, the PIPELINE
/// SCHEDULER of one rank.
class node {
public:
  node(actor_host& host, node_options options);

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

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
