#pragma once

// The actors of a rank in words that fit every kind. Free of CAF.

#include "actors/protocol/run_status.hpp"

#include <string>

namespace smp {

/// Makes entries of one rank: ids begin with "r0.".
class actor_entries {
public:
  explicit actor_entries(rank_id rank)
    : prefix_("r" + std::to_string(rank.value) + '.') {
    // nop
  }

  actor_status server(const server_counts& x) const;

  /// The MODULE SERVER that does not answer.
  actor_status silent_server() const;

  actor_status context(const context_status& x) const;

  actor_status scheduler(const scheduler_status& x) const;

  /// The user's schedule. @pre it owes an answer
  actor_status schedule(const scheduler_status& x) const;

  actor_status watch(const rank_view& x) const;

  /// A stage of communication, which is read beside its actor.
  actor_status stage(const comm_stage_status& x) const;

  /// Any of these that does not answer.
  actor_status silent(actor_status x) const;

private:
  actor_status entry(const char* id, const char* name) const;

  std::string prefix_;
};

} // namespace smp
