#pragma once

#include "transport/fabric.hpp"
#include "transport/wait.hpp"
#include "transport/wake_up.hpp"

#include <ATen/ThreadLocalState.h>

#include <memory>
#include <thread>
#include <utility>

namespace smp {

/// The innermost waiter of the user's thread. A collective outside of steps
/// takes messages for which another thread would have to be woken, only to wake
/// this one: so this thread parks at the fabric and takes them itself. In a
/// step it must not: a parked execution is closer to them.
class parking_waiter final : public waiter {
public:
  /// @returns the waiter of the calling thread.
  static parking_waiter& of_thread() {
    thread_local parking_waiter result;
    return result;
  }

  /// @param x the fabric of this thread's rank; null: none
  void attach(fabric* x) noexcept {
    fabric_ = x;
  }

  /// While alive, waits of the calling thread park at the fabric.
  class parking {
  public:
    parking() : previous_(std::exchange(of_thread().parks_, true)) {
      // nop
    }

    ~parking() {
      of_thread().parks_ = previous_;
    }

    parking(const parking&) = delete;
    parking& operator=(const parking&) = delete;

  private:
    bool previous_;
  };

  void wait(const completion_ptr& x, const wait_reason& why) override {
    if (!parks_ || fabric_ == nullptr || x->done())
      return plain_.wait(x, why);
    // Shared with the callback, which the completion keeps after it ran.
    auto done = std::make_shared<pollable_wake_up>();
    x->on_done([done] { done->notify(); });
    {
      // Handlers that run meanwhile must not see the user's thread state.
      at::ThreadLocalStateGuard plain{plain_state()};
      released_lock meanwhile;
      fabric_->park(*done);
    }
    if (auto cause = x->cause())
      throw error{std::move(cause)};
  }

private:
  /// @pre no waiter is installed
  parking_waiter() = default;

  /// @returns the LibTorch thread-local state of a fresh thread.
  static const at::ThreadLocalState& plain_state() {
    static const auto result = [] {
      at::ThreadLocalState x;
      std::thread{[&x] { x = at::ThreadLocalState{}; }}.join();
      return x;
    }();
    return result;
  }

  fabric* fabric_ = nullptr;
  bool parks_ = false;
  waiter& plain_ = waiter::current();
};

} // namespace smp
