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

/// What a STALL MONITOR says.
struct stall_report {
  /// Nothing can go on; else nothing went on for long.
  bool deadlock = false;
  bool ends = false;
  /// With this the step fails, and the run goes on; or nothing.
  failure step_fails;
  /// Which one that is, for each rank.
  std::vector<step_id> steps;
  /// One line: the chain of waits and the culprit.
  std::string text;
  /// One line for each who executes or waits.
  std::vector<std::string> all;
  rank_id culprit = no_rank;
  /// Did not answer.
  std::vector<rank_id> silent;
  /// The ranks were told, too, and rank 0 says it.
  bool ranks_know = true;
};

/// A legal run may compute for hours, so time proves nothing (R7). What proves
/// a deadlock: on all ranks nothing executes, nothing is on its way inside of
/// a rank, and every message that was sent was received; twice, with the same
/// counters. Everything else is only reported, after a time without progress.
///
/// Asks for little while a run goes on: one number of each rank. Only when none
/// of them moved it wants to see more.
class stall_judge {
public:
  using time_point = std::chrono::steady_clock::time_point;

  stall_judge(uint64_t world_size, stall_options options, time_point now);

  /// A rank answered with the number of its `rank_board`.
  /// @returns whether something moved there
  bool heard(rank_id who, uint64_t progress, time_point now);

  /// @returns for how long nothing moved on any rank, in seconds.
  double quiet(time_point now) const {
    return seconds(quiet_since_, now);
  }

  /// Tells whether it is time to see all ranks.
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
  /// Numbers of the ranks at the last look that found nothing going on.
  std::vector<uint64_t> settled_;
  /// The same when a step was last told to fail.
  std::vector<uint64_t> failed_;
  uint64_t looks_ = 0; // since the last progress
  uint64_t next_look_ = 0;
  uint64_t asked_ = 0; // the same, also those that were no looks
  bool ended_ = false;
};

} // namespace smp
