#pragma once

// A run as the page shows it: parts of JSON, from one look after the other.

#include "apps/report/rank_table.hpp"
#include "apps/report/run_json.hpp"
#include "apps/report/run_source.hpp"
#include "apps/web/metrics_history.hpp"

#include <chrono>
#include <deque>
#include <set>
#include <string>
#include <vector>

namespace smp::app {

/// The parts of the page by name: those of the last look, and as null those
/// that the run does not tell:
///
///   run        what `head_json` says, and "time" (when this was, in ms)
///   ranks      rows of smp-top, with "pp", "host", "pid", "step", "why" and
///              "oldest", the longest wait in seconds
///   waits      who waits for whom: "chain", "all"
///   traffic    messages between ranks since the session began
///   grid       see pipeline_grid.hpp
///   metrics    a list for each of "step", "loss" ...
///   partition  RUN_DIR/partition.json
///   events     what happened: "when", "text", "bad"
class run_feed {
public:
  /// Throws as `run_source`
  explicit run_feed(std::string place, std::string secret_file = {});

  /// @param patience see `run_source::look`
  json look(std::chrono::milliseconds patience = {});

private:
  using clock = std::chrono::steady_clock;

  json grid_of(const run_look& x);
  void note_problems(const run_look& x);
  json events_of(const run_look& x) const;

  run_source source_;
  rank_rows rows_;
  metrics_history history_;
  /// Records are large: they are asked for in a small part of the time.
  clock::time_point next_events_ = {};
  json grid_;
  json partition_;
  /// What was wrong at the last look.
  std::set<std::string> problems_;
  std::deque<run_event> seen_;
};

/// The part "ranks".
json ranks_json(const run_look& x, const std::vector<rank_row>& rows);

/// The part "metrics".
json metrics_json(const std::vector<step_point>& xs);

/// The part "traffic" of a run that answers.
json traffic_json(const run_status& x);

/// @returns seconds that the oldest request of a rank is there; 0: none is
double oldest_request(const rank_entry& x);

} // namespace smp::app
