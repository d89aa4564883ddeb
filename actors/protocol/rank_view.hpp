#pragma once

// Snapshot of what one rank executes, waits for and has sent. Free of CAF.

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/wait_subject.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// An entity on a rank that executes or waits.
struct activity {
  enum class kind : uint8_t {
    main,     // the user's thread
    context,  // a WORKER CONTEXT that serves a request
    queued,   // a request that has no context yet
    schedule, // an actor that others wait for, such as the user's schedule
    device,   // what executions launched, after they returned their token
  };

  kind who = kind::main;
  bool executes = false;
  /// For the user's thread: its step runs on without it, or is ending; until
  /// the step is over, this thread calls no module.
  bool ends_step = false;
  /// For a queued request: its rank has not begun the step that it belongs to.
  bool of_later_step = false;
  /// "module b, microbatch 0, forward"; "schedule actor "x" owes an answer".
  std::string what;
  /// For a context or a queued request; number 0: none.
  request_id serves;
  /// Set while it waits: "module b, microbatch 0, forward". Like all texts
  /// here for people only; what is decided is decided by `subject`.
  std::string waits_for;
  wait_subject subject;
  rank_id from = no_rank; // the rank it waits for; no_rank: no particular one
  /// The request whose answer it waits for; number 0: none, or unknown.
  request_id asks;
  /// Time in this state.
  double seconds = 0;
  /// Short forms for tables: "FWD mb3 encoder.block.5" and "encoder.block.5".
  std::string brief;
  std::string awaits;
};

constexpr activity::kind last_of(activity::kind) noexcept {
  return activity::kind::device;
}

/// Number of messages to and from one other rank since the session began.
struct traffic {
  rank_id peer;
  uint64_t sent = 0;
  uint64_t taken = 0;
  /// Sent, but still queued in the fabric for lack of credits of `peer`.
  uint64_t queued = 0;
};

/// A rank's calls of one shared module in one step.
struct shared_calls {
  std::string module; // its path; empty: the step body
  microbatch_id microbatch;
  phase what = phase::forward;
  uint64_t calls = 0;
  /// True if one of them waits for a peer that has not arrived.
  bool waits = false;
  /// Names of the collectives that it is executing.
  std::vector<std::string> running;
};

struct rank_view {
  rank_id rank;
  /// Increases with everything that happens on the rank.
  uint64_t progress = 0;
  /// The rank said goodbye, or is about to.
  bool left = false;
  /// True if its actors answered; otherwise parts of this view are unknown.
  bool complete = false;
  /// Nothing executes, and no message is in flight between its actors.
  bool settled = false;
  /// Messages that arrived and were refused.
  uint64_t refused = 0;
  std::vector<activity> activities;
  std::vector<traffic> peers;
  /// The step that it runs or ran last, by its own count.
  step_id step;
  /// The ranks that share modules with it, including itself; and, if it is
  /// settled, its calls of these modules in that step.
  std::vector<rank_id> sharers;
  std::vector<shared_calls> shared;
};

} // namespace smp
