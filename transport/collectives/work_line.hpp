#pragma once

#include "transport/wake_up.hpp"

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace smp {

/// Runs tasks one after the other, in order. Small ones run at once on the
/// thread that adds them, which is the fastest. But that thread may be one that
/// must not be held up, like the one that moves all messages; so large tasks,
/// and those behind them, run on a thread of this line (R30), which starts when
/// it is first needed. Thread-safe; a task may add tasks.
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

  /// Runs the tasks added before; drops those added later.
  /// @pre no task is running on the calling thread
  void close();

  /// @returns whether any task that was added has not finished.
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
  /// A thread is running the entries.
  bool running_ = false;
  bool ending_ = false;
  std::atomic<uint64_t> open_ = 0;
  wake_up wake_;
  std::thread thread_;
};

} // namespace smp
