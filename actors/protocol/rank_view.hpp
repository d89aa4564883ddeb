#pragma once

// What one rank executes, waits for and has sent, at one moment. Free of CAF.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// Somebody on a rank who executes or waits.
struct activity {
  enum class kind : uint8_t {
    main,     // the user's thread
    context,  // a WORKER CONTEXT that serves a request
    queued,   // a request that no context has yet
    schedule, // an actor that others wait for, such as the user's schedule
  };

  kind who = kind::main;
  bool executes = false;
  /// Of the user's thread: its step runs on without it, or ends; until that is
  /// over it calls no module.
  bool ends_step = false;
  /// "module b, microbatch 0, forward"; "schedule actor "x" owes an answer".
  std::string what;
  /// Of a context or a queued request; number 0: none.
  request_id serves;
  /// While it waits: "module b, microbatch 0, forward".
  std::string waits_for;
  rank_id from = no_rank; // no_rank: nobody in particular
  /// The request that it waits for; number 0: none, or not known.
  request_id asks;
  /// In this state for so long.
  double seconds = 0;
  /// The same for tables: "FWD mb3 encoder.block.5", and "encoder.block.5".
  std::string brief;
  std::string awaits;
};

constexpr activity::kind last_of(activity::kind) noexcept {
  return activity::kind::schedule;
}

/// Messages to and from one other rank since the session began.
struct traffic {
  rank_id peer;
  uint64_t sent = 0;
  uint64_t taken = 0;
  /// Sent, but the fabric waits for credits of `peer`.
  uint64_t queued = 0;
};

/// What a rank called, in one step, of a module that it shares.
struct shared_calls {
  std::string module; // its path; empty: the step body
  microbatch_id microbatch;
  phase what = phase::forward;
  uint64_t calls = 0;
  /// In one of them it waits for a peer that did not come.
  bool waits = false;
  /// Names of the collectives in which it is.
  std::vector<std::string> running;
};

struct rank_view {
  rank_id rank;
  /// Grows with everything that happens on the rank.
  uint64_t progress = 0;
  /// It said goodbye, or is about to.
  bool left = false;
  /// Its actors answered; else part of this is unknown.
  bool complete = false;
  /// Nothing executes, and nothing is on its way between its actors.
  bool settled = false;
  /// Messages that arrived and were dropped.
  uint64_t refused = 0;
  std::vector<activity> activities;
  std::vector<traffic> peers;
  /// The step that it runs, or ran last, by its own count.
  step_id step;
  /// Who shares modules with it, itself among them; and what it called of them
  /// in that step, if it is settled.
  std::vector<rank_id> sharers;
  std::vector<shared_calls> shared;
};

} // namespace smp
