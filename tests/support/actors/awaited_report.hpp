#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

/// The first report of a stall that says all that a test expects; threads wait
/// for it. Where threads do not get their turn, others may come before, about
/// gaps that nobody planned.
class awaited_report {
public:
  explicit awaited_report(std::vector<std::string> parts)
    : parts_(std::move(parts)) {
    // nop
  }

  /// Any thread.
  void hear(const std::string& x) {
    std::lock_guard guard{mutex_};
    if (came())
      return;
    text_ = x;
    if (std::all_of(parts_.begin(), parts_.end(), [&](auto& part) {
          return x.find(part) != std::string::npos;
        }))
      heard_.set_value();
  }

  /// Any thread. Gives up after a while, for the test to say what came instead.
  void wait() const {
    came_.wait_until(deadline_);
  }

  bool came() const {
    return came_.wait_for(std::chrono::seconds{0}) == std::future_status::ready;
  }

  /// @returns it, or the last one while it has not come
  std::string text() const {
    std::lock_guard guard{mutex_};
    return text_;
  }

private:
  const std::vector<std::string> parts_;
  const std::chrono::steady_clock::time_point deadline_
    = std::chrono::steady_clock::now() + std::chrono::seconds{30};
  mutable std::mutex mutex_;
  std::string text_; // guarded by mutex_
  std::promise<void> heard_;
  const std::shared_future<void> came_{heard_.get_future()};
};

} // namespace smp::test
