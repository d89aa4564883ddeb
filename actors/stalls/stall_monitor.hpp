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

/// To be spawned detached: it must answer while the pool is stuck.
rank_watch_actor::behavior_type
rank_watch(rank_watch_actor::stateful_pointer<rank_watch_state> self,
           watched_rank rank);

// -- all ranks ----------------------------------------------------------------

struct stall_monitor_config {
  std::vector<rank_watch_actor> ranks; // by rank
  stall_options options;
  /// Hears of each report. Any thread; must not block.
  std::function<void(const stall_report&)> on_report;
};

struct stall_monitor_state {
  static inline const char* name = "smp.stall-monitor";

  using pointer = stall_monitor_actor::stateful_pointer<stall_monitor_state>;

  explicit stall_monitor_state(pointer self) : self(self) {
    // nop
  }

  /// Asks the ranks that owe no answer.
  void look();

  /// Asks all ranks for all, if it is time.
  void look_closer();

  /// One more answered, or did not.
  void viewed();

  void report(const stall_report& x);

  pointer self;
  stall_monitor_config config;
  std::optional<stall_judge> judge;
  std::set<uint64_t> asked; // ranks that owe the answer to a look
  size_t viewing = 0;       // ranks that owe a view
  std::vector<rank_view> views;
  stall_status status;
};

stall_monitor_actor::behavior_type
stall_monitor(stall_monitor_state::pointer self, stall_monitor_config config);

} // namespace smp
