#pragma once

// Looks at a run again and again while another thread draws.

#include "apps/report/rank_table.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace smp::app {

/// A run that does not answer must not block the keyboard, so a separate thread
/// asks it.
class poller {
public:
  struct result {
    run_look look;
    std::vector<rank_row> rows;
    std::vector<flight_log> events; // recent ones
  };

  /// @param source outlives this
  /// @param first the first look, already taken
  poller(run_source& source, std::chrono::milliseconds interval,
         run_look first);

  ~poller();

  poller(const poller&) = delete;
  poller& operator=(const poller&) = delete;

  /// @returns the latest result, unless it was returned before.
  std::optional<result> news();

private:
  void run(run_look first);
  void publish(run_look x);

  run_source& source_;
  std::chrono::milliseconds interval_;
  // Used by the thread only.
  rank_rows rows_;
  std::vector<flight_log> events_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<result> news_;
  std::thread thread_;
};

} // namespace smp::app
