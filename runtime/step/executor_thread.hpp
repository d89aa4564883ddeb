#pragma once

#include "actors/protocol/executor.hpp"
#include "runtime/execution/running_call.hpp"
#include "transport/fabric.hpp"
#include "transport/wait.hpp"
#include "transport/wake_up.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace smp {

/// Runs the requests that an executor thread receives.
class request_runner {
public:
  virtual ~request_runner() = default;

  /// Runs the step body, or a request of another rank.
  /// @returns the body of the response
  /// @throws any exception of the user's code
  virtual payload run(running_call& ex, request& x) = 0;
};

/// Runs requests on a thread that parks at every call (R24). All of autograd's
/// thread-local state stays on that thread, so a backward that waits for
/// another rank keeps its stack.
class executor_thread final : public executor,
                              public running_call,
                              public waiter {
public:
  executor_thread(executor_listener& listener, const rank_context& rank,
                  fabric& messages, request_runner& runner);

  ~executor_thread() override;

  // -- executor (pool thread) -------------------------------------------------

  void start(request x) override;

  void resume(response x) override;

  // -- execution and waiter (own thread) --------------------------------------

  response park(call x) override;

  void send(call x) override;

  void wait(const completion_ptr& x, const wait_reason& why) override;

private:
  void run();
  void check_going() const;
  outcome execute(request x);
  failure cancelled() const;
  void switch_in();
  void switch_out();
  void pause();

  executor_listener& listener_;
  fabric& messages_;
  request_runner& runner_;
  request request_;
  response response_;
  std::chrono::steady_clock::time_point since_;
  std::atomic<bool> stopping_ = false;
  /// A counting wake-up: a stop may arrive before the last one is consumed.
  pollable_wake_up wake_;
  std::thread thread_;
};

/// @param drawn_step see `step_counters`
/// @returns the seed of a microbatch's random numbers (R23)
uint64_t seed_of(const rank_context& rank, uint64_t drawn_step,
                 microbatch_id m);

} // namespace smp
