#pragma once

#include "transport/ids.hpp"

#include <atomic>
#include <cstdint>

namespace smp {

/// The module whose code an execution runs right now. Written without a lock
/// by the thread that executes.
class call_slot {
public:
  static constexpr uint64_t none = ~uint64_t{0};

  /// @returns what to give back to `leave`
  uint64_t enter(module_id x) noexcept {
    calls_.store(calls_.load(relaxed) + 1, relaxed);
    auto outer = module_.load(relaxed);
    module_.store(x.value, relaxed);
    return outer;
  }

  void leave(uint64_t outer) noexcept {
    calls_.store(calls_.load(relaxed) + 1, relaxed);
    module_.store(outer, relaxed);
  }

  uint64_t module() const noexcept {
    return module_.load(relaxed);
  }

  uint64_t calls() const noexcept {
    return calls_.load(relaxed);
  }

  /// @returns the slot of the calling thread's execution, or null.
  static call_slot* current() noexcept;

  static void set_current(call_slot* x) noexcept;

private:
  static constexpr auto relaxed = std::memory_order_relaxed;

  std::atomic<uint64_t> module_ = none;
  std::atomic<uint64_t> calls_ = 0;
};

} // namespace smp
