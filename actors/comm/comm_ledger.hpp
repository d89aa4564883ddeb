#pragma once

#include "actors/protocol/comm_message.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace smp {

/// Accounts of the stages: what each did, and where each message is. Can be
/// read at any time, whatever the stages do. Thread-safe.
class comm_ledger {
public:
  using clock = std::chrono::steady_clock;

  // -- counts -----------------------------------------------------------------

  void handled(comm_stage x, uint64_t bytes) noexcept {
    auto& y = at(x);
    y.handled.fetch_add(1, std::memory_order_relaxed);
    y.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  void passed_by(comm_stage x) noexcept {
    at(x).passed_by.fetch_add(1, std::memory_order_relaxed);
  }

  void sent(comm_rule x) noexcept {
    sent_[static_cast<size_t>(x)].fetch_add(1, std::memory_order_relaxed);
  }

  void received(comm_rule x) noexcept {
    received_[static_cast<size_t>(x)].fetch_add(1, std::memory_order_relaxed);
  }

  // -- messages that leave ----------------------------------------------------

  /// @pre no message has this number
  void enter(const comm_message& x, comm_stage where);

  void move(uint64_t number, comm_stage to);

  void leave(uint64_t number);

  /// Waits until none is in flight. @returns whether that was before `deadline`
  bool wait_until_empty(clock::time_point deadline);

  // -- for those who look -----------------------------------------------------

  comm_stage_status status_of(comm_stage x) const;

  /// Fills in stages, rules and the oldest messages.
  void write(comm_report& x) const;

private:
  struct counts {
    std::atomic<uint64_t> handled = 0;
    std::atomic<uint64_t> bytes = 0;
    std::atomic<uint64_t> passed_by = 0;
  };

  struct entry {
    rank_id peer;
    uint64_t bytes = 0;
    comm_stage at = comm_stage::initiator;
    clock::time_point since = {};
  };

  counts& at(comm_stage x) noexcept {
    return counts_[static_cast<size_t>(x)];
  }

  /// @pre `mutex_` is held
  comm_stage_status count(comm_stage x) const;

  std::array<counts, comm_stages> counts_;
  std::array<std::atomic<uint64_t>, comm_rules> sent_ = {};
  std::array<std::atomic<uint64_t>, comm_rules> received_ = {};
  mutable std::mutex mutex_;
  std::condition_variable emptied_;
  std::map<uint64_t, entry> entries_; // by number, so the oldest first
};

} // namespace smp
