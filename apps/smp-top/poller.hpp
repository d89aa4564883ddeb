#pragma once

// Looks at a run again and again while somebody else draws.

#include "apps/report/rank_table.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace smp::app {

/// A run that does not answer must not keep keys from being heard, so it is
/// asked on a thread of its own.
class poller {
public:
  struct result {
    run_look look;
    std::vector<rank_row> rows;
  };

  /// @param source outlives this
  /// @param first what was found already
  poller(run_source& source, std::chrono::milliseconds interval,
         run_look first);

  ~poller();

  poller(const poller&) = delete;
  poller& operator=(const poller&) = delete;

  /// @returns what was found last, unless it was returned before.
  std::optional<result> news();

private:
  void run(run_look first);
  void publish(run_look x);

  run_source& source_;
  std::chrono::milliseconds interval_;
  rank_rows rows_; // of the thread only
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<result> news_;
  std::thread thread_;
};

} // namespace smp::app
