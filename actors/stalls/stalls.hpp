#pragma once

// The search for stalls. Free of CAF.

#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/flight_query.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/run_status.hpp"
#include "actors/stalls/stall_judge.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// What a RANK WATCH can read and do on its rank. Called on its thread, which
/// may block for as long as a STALL MONITOR waits.
struct watched_rank {
  /// @returns a number that differs from the last one if anything happened.
  std::function<uint64_t()> look;
  std::function<rank_view()> view;
  /// For clients outside the run.
  std::function<rank_status()> status;
  /// @returns an image of events, or nothing
  std::function<std::string(const flight_query&)> flight;
  /// The run is stalled, as the text says, but continues.
  std::function<void(const std::string&)> report;
  /// The run is stalled and must end.
  std::function<void(const failure&)> end;
  /// This step fails. It may be over by the time a rank hears of it, as peers
  /// also tell each other.
  std::function<void(step_id, const failure&)> fail_step;
};

/// Receives the text of a stall and whether the run must end.
using stall_listener = std::function<void(const std::string& text, bool ends)>;

/// STALL MONITOR for ranks that all live in this process.
class stall_search {
public:
  stall_search(actor_host& host, stall_options options,
               std::vector<watched_rank> ranks);

  ~stall_search();

  /// Lets clients observe the ranks. @returns where to connect
  inspection_entry open_inspection();

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
