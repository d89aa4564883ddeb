#pragma once

// Decides when a run is stalled, without actors and without a clock of its own.

#include "actors/protocol/introduction.hpp"
#include "actors/protocol/rank_view.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Report of a STALL MONITOR.
struct stall_report {
  /// Nothing can proceed; false: nothing has proceeded for long.
  bool deadlock = false;
  bool ends = false;
  /// The failure for the step, after which the run continues; or nothing.
  failure step_fails;
  /// The step that fails, for each rank.
  std::vector<step_id> steps;
  /// One line: the chain of waits and the culprit.
  std::string text;
  /// One line per thread, context or request that executes or waits.
  std::vector<std::string> all;
  rank_id culprit = no_rank;
  /// Ranks that did not answer.
  std::vector<rank_id> silent;
  /// The ranks were told too, and rank 0 prints it.
  bool ranks_know = true;
};

/// A legal run may compute for hours, so time proves nothing (R7). Proof of a
/// deadlock: on all ranks nothing executes, no message is in flight inside a
/// rank, and every message that was sent was received; twice, with the same
/// counters. Anything else is only reported, after a time without progress.
///
/// Costs little while a run progresses: one number per rank and poll. Only if
/// none of them has changed are full views of the ranks needed.
class stall_judge {
public:
  using time_point = std::chrono::steady_clock::time_point;

  stall_judge(uint64_t world_size, stall_options options, time_point now);

  /// A rank reported the progress number of its `rank_board`.
  /// @returns whether that number changed
  bool heard(rank_id who, uint64_t progress, time_point now);

  /// @returns for how long nothing has changed on any rank, in seconds.
  double quiet(time_point now) const {
    return seconds(quiet_since_, now);
  }

  /// Tells whether it is time to collect views of all ranks.
  bool wants_views(time_point now);

  /// @param views of the ranks that answered in time
  std::optional<stall_report> judge(std::vector<rank_view> views,
                                    time_point now);

private:
  struct rank_entry {
    uint64_t progress = 0;
    time_point heard;
  };

  double seconds(time_point since, time_point now) const {
    return std::chrono::duration<double>(now - since).count();
  }

  bool due(time_point now) const {
    return seconds(quiet_since_, now) >= next_report_;
  }

  bool is_settled(const std::vector<rank_view>& views) const;

  stall_options options_;
  std::vector<rank_entry> ranks_;
  time_point quiet_since_;
  double next_report_; // seconds after `quiet_since_`
  /// Progress numbers at the last look that found all ranks settled.
  std::vector<uint64_t> settled_;
  /// The same, when a step was last made to fail.
  std::vector<uint64_t> failed_;
  uint64_t looks_ = 0; // since the last progress
  uint64_t next_look_ = 0;
  uint64_t asked_ = 0; // polls since the last progress, with or without a look
  bool ended_ = false;
};

} // namespace smp
