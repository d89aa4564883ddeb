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

  void enter(module_id x) {
    outer_.push_back(module_.load(relaxed));
    moved(x.value);
  }

  /// Ends the innermost call. @pre a call is open
  void leave() noexcept {
    moved(outer_.back());
    outer_.pop_back();
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

  std::vector<uint64_t> outer_; // accessed by the executing thread only
  std::atomic<uint64_t> module_ = none;
  std::atomic<uint64_t> calls_ = 0;
};

} // namespace smp
