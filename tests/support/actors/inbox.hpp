#pragma once

#include "transport/fabric.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace smp::test {

/// How long a test waits for something that must happen.
inline constexpr std::chrono::seconds patience{30};

/// Keeps what a fabric tells, for a test to wait for and to look at.
class inbox : public fabric_listener {
public:
  using clock = std::chrono::steady_clock;

  void on_message(rank_id from, message x) override {
    std::lock_guard guard{mutex_};
    messages_.emplace_back(from, std::move(x));
    changed_.notify_all();
  }

  void on_peer_lost(const failure& x) override {
    std::lock_guard guard{mutex_};
    losses_.push_back(x);
    changed_.notify_all();
  }

  /// A callback for `send` that counts, and keeps the failures.
  fabric::sent_callback on_sent() {
    return [this](const failure& x) {
      std::lock_guard guard{mutex_};
      ++sent_;
      if (x)
        send_failures_.push_back(x);
      changed_.notify_all();
    };
  }

  // -- waits, false after the deadline ----------------------------------------

  bool wait_messages(size_t count, clock::duration limit = patience) {
    return wait([&] { return messages_.size() >= count; }, limit);
  }

  bool wait_losses(size_t count, clock::duration limit = patience) {
    return wait([&] { return losses_.size() >= count; }, limit);
  }

  bool wait_sent(size_t count, clock::duration limit = patience) {
    return wait([&] { return sent_ >= count; }, limit);
  }

  // -- what was heard ---------------------------------------------------------

  std::vector<std::pair<rank_id, message>> messages() const {
    std::lock_guard guard{mutex_};
    return messages_;
  }

  std::vector<std::pair<rank_id, message>> take_messages() {
    std::lock_guard guard{mutex_};
    return std::exchange(messages_, {});
  }

  std::vector<failure> losses() const {
    std::lock_guard guard{mutex_};
    return losses_;
  }

  size_t sent() const {
    std::lock_guard guard{mutex_};
    return sent_;
  }

  std::vector<failure> send_failures() const {
    std::lock_guard guard{mutex_};
    return send_failures_;
  }

private:
  template <class Predicate>
  bool wait(Predicate ready, clock::duration limit) {
    std::unique_lock guard{mutex_};
    return changed_.wait_for(guard, limit, ready);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<rank_id, message>> messages_;
  std::vector<failure> losses_;
  std::vector<failure> send_failures_;
  size_t sent_ = 0;
};

} // namespace smp::test
