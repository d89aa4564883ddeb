#pragma once

// Status of the actors of a rank, in terms that fit every kind. Free of CAF.

#include "actors/protocol/run_status.hpp"

#include <string>

namespace smp {

/// Makes the entries of one rank; their ids begin with "r0.", for rank 0.
class actor_entries {
public:
  explicit actor_entries(rank_id rank)
    : prefix_("r" + std::to_string(rank.value) + '.') {
    // nop
  }

  actor_status server(const server_counts& x) const;

  /// Entry of a MODULE SERVER that does not answer.
  actor_status silent_server() const;

  actor_status context(const context_status& x) const;

  actor_status scheduler(const scheduler_status& x) const;

  /// Entry of the user's schedule. @pre it has an event to answer
  actor_status schedule(const scheduler_status& x) const;

  actor_status watch(const rank_view& x) const;

  /// Entry of a communication stage, whose status is read without its actor.
  actor_status stage(const comm_stage_status& x) const;

  /// Turns the entry of any of these into that of a silent actor.
  actor_status silent(actor_status x) const;

private:
  actor_status entry(const char* id, const char* name) const;

  std::string prefix_;
};

} // namespace smp
