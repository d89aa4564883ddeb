#pragma once

#include "transport/ids.hpp"

#include <atomic>
#include <cstdint>
#include <vector>

namespace smp {

/// The module whose code an execution runs right now. The executing thread
/// writes it without a lock.
class call_slot {
public:
  static constexpr uint64_t none = ~uint64_t{0};

  /// An execution begins.
  void begin() noexcept {
    failed_ = none;
  }

  void enter(module_id x) {
    failed_ = none; // what failed before was caught
    outer_.push_back(module_.load(relaxed));
    moved(x.value);
  }

  /// Ends the innermost call. @pre a call is open
  /// @param failed by an exception
  void leave(bool failed) noexcept {
    failed_ = !failed ? none : failed_ == none ? module() : failed_;
    moved(outer_.back());
    outer_.pop_back();
  }

  /// @returns the innermost module of those that an exception left
  uint64_t failed() const noexcept {
    return failed_;
  }

  uint64_t module() const noexcept {
    return module_.load(relaxed);
  }

  uint64_t calls() const noexcept {
    return calls_.load(relaxed);
  }

private:
  static constexpr auto relaxed = std::memory_order_relaxed;

  void moved(uint64_t module) noexcept {
    calls_.store(calls_.load(relaxed) + 1, relaxed);
    module_.store(module, relaxed);
  }

  // Accessed by the executing thread only.
  std::vector<uint64_t> outer_;
  uint64_t failed_ = none;
  std::atomic<uint64_t> module_ = none;
  std::atomic<uint64_t> calls_ = 0;
};

} // namespace smp
