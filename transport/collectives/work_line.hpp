#pragma once

#include "transport/wake_up.hpp"

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace smp {

/// Runs tasks one after the other, in their order. Small ones run at once, on
/// the thread that adds them, as nothing is quicker. But that may be a thread
/// that must go on, as the one that moves all messages does: so large ones, and
/// what is behind them, run on a thread of this line (R30), which is made when
/// it is first wanted. Thread-safe; a task may add tasks.
class work_line {
public:
  using task = std::function<void()>;

  work_line() = default;

  ~work_line() {
    close();
  }

  work_line(const work_line&) = delete;
  work_line& operator=(const work_line&) = delete;

  void add(task f, bool large);

  /// Runs what was added before; drops what is added later.
  /// @pre no task is running on the calling thread
  void close();

  /// @returns whether any task that was added has not ended.
  bool busy() const noexcept {
    return open_ > 0;
  }

private:
  struct entry {
    task f;
    bool large;
  };

  void run_here();
  void run_large();
  /// @pre `mutex_` is held
  void wake_thread();

  std::mutex mutex_;
  std::deque<entry> entries_;
  /// Some thread runs them.
  bool running_ = false;
  bool ending_ = false;
  std::atomic<uint64_t> open_ = 0;
  wake_up wake_;
  std::thread thread_;
};

} // namespace smp
