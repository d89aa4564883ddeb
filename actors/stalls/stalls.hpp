#pragma once

// The search for stalls. Free of CAF.

#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/run_status.hpp"
#include "actors/stalls/stall_judge.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// What a RANK WATCH knows and does about its rank. Called on its thread, which
/// may block for as long as a STALL MONITOR waits.
struct watched_rank {
  /// @returns a number that differs from the last one if anything happened.
  std::function<uint64_t()> look;
  std::function<rank_view()> view;
  /// For who looks at the run from outside.
  std::function<rank_status()> status;
  /// The run is stalled, in words, and goes on.
  std::function<void(const std::string&)> report;
  /// The run is stalled and has to end.
  std::function<void(const failure&)> end;
  /// That step fails. It may be over when a rank hears of it: peers tell each
  /// other as well.
  std::function<void(step_id, const failure&)> fail_step;
};

/// Hears of a stall in words, and whether the run has to end.
using stall_listener = std::function<void(const std::string& text, bool ends)>;

/// STALL MONITOR of ranks that live in this process.
class stall_search {
public:
  stall_search(actor_host& host, stall_options options,
               std::vector<watched_rank> ranks);

  ~stall_search();

  /// Lets clients look at the ranks. @returns where
  inspection_entry open_inspection();

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
