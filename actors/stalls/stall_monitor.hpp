#pragma once

#include "actors/protocol/actors.hpp"
#include "actors/stalls/stall_judge.hpp"
#include "actors/stalls/stalls.hpp"

#include <caf/stateful_actor.hpp>

#include <functional>
#include <optional>
#include <set>
#include <vector>

namespace smp {

// -- one rank -----------------------------------------------------------------

struct rank_watch_state {
  static inline const char* name = "smp.rank-watch";
};

/// Must be spawned detached: it must answer while the pool is stuck.
rank_watch_actor::behavior_type
rank_watch(rank_watch_actor::stateful_pointer<rank_watch_state> self,
           watched_rank rank);

// -- all ranks ----------------------------------------------------------------

struct stall_monitor_config {
  std::vector<rank_watch_actor> ranks; // by rank
  stall_options options;
  /// Called for each report. On any thread; must not block.
  std::function<void(const stall_report&)> on_report;
};

struct stall_monitor_state {
  static inline const char* name = "smp.stall-monitor";

  using pointer = stall_monitor_actor::stateful_pointer<stall_monitor_state>;

  explicit stall_monitor_state(pointer self) : self(self) {
    // nop
  }

  /// Polls the ranks that do not owe an answer.
  void look();

  /// Asks all ranks for their views, if it is time.
  void look_closer();

  /// One more rank sent its view, or failed to.
  void viewed();

  void report(const stall_report& x);

  pointer self;
  stall_monitor_config config;
  std::optional<stall_judge> judge;
  std::set<uint64_t> asked; // ranks that owe a progress number
  size_t viewing = 0;       // ranks that owe a view
  std::vector<rank_view> views;
  stall_status status;
};

stall_monitor_actor::behavior_type
stall_monitor(stall_monitor_state::pointer self, stall_monitor_config config);

} // namespace smp
